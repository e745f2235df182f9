"""LayerNorm, optionally of a residual sum with dropout, as two GPU kernels with one pass over memory each."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from bertjax.config.model_config import Compute
from bertjax.nn.kernels.pallas import Ref, call_on_blocks, key_words, on_mesh
from bertjax.nn.kernels.triton import gpu_call, has_gpu_kernels, kept_at

WIDEST = 2048  # larger hidden sizes do not fit in registers
_TOKENS = 4  # tokens that a program processes at a time
_PLANE = ("batch", "length", None)
_WORDS = ("batch", None)
_SUMS = ("batch", None, None)
_WHOLE = (None,)


def can_norm_on_gpu(compute: Compute, length: int, hidden: int) -> bool:
    """Returns whether the kernels support `length` tokens of a hidden size."""
    return has_gpu_kernels(compute) and length % _TOKENS == 0 and hidden <= WIDEST


def gpu_norm(x: Array, scale: Array, bias: Array | None, epsilon: float, chip: str) -> Array:
    """LayerNorm(x) over the last axis; see `gpu_add_norm`."""
    norm = _Norm(x.shape[1], x.shape[2], 0.0, epsilon, chip)
    return _normalize(x, None, None, scale, bias, key_words(None, len(x)), norm)[0]


def gpu_add_norm(
    x: Array,
    update: Array,
    update_bias: Array | None,
    scale: Array,
    bias: Array | None,
    dropout_keys: Array | None,
    rate: float,
    epsilon: float,
    chip: str,
) -> Array:
    """LayerNorm(x + dropout(update + update_bias)) over the last axis: `[batch, length, hidden]`.

    Args:
      x: `[batch, length, hidden]`; length is a multiple of 4.
      update: `[batch, length, hidden]`.
      update_bias: `[hidden]`, or None.
      scale: `[hidden]` float32.
      bias: `[hidden]` float32, or None.
      dropout_keys: `[batch]`; None: no dropout.
      rate: the dropout rate.
      epsilon: added to the variance.
      chip: `device_kind`.
    """
    norm = _Norm(x.shape[1], x.shape[2], 0.0 if dropout_keys is None else rate, epsilon, chip)
    return _normalize(x, update, update_bias, scale, bias, key_words(dropout_keys, len(x)), norm)[0]


def gpu_sum_and_norm(
    x: Array,
    update: Array,
    update_bias: Array | None,
    scale: Array,
    bias: Array | None,
    dropout_keys: Array | None,
    rate: float,
    epsilon: float,
    chip: str,
) -> tuple[Array, Array]:
    """Returns the sum x + dropout(update + update_bias), and its LayerNorm; see `gpu_add_norm`."""
    norm = _Norm(x.shape[1], x.shape[2], 0.0 if dropout_keys is None else rate, epsilon, chip, uses_sum=True)
    return _normalize(x, update, update_bias, scale, bias, key_words(dropout_keys, len(x)), norm)[::-1]


class _Norm(NamedTuple):
    """The settings of both kernels."""

    length: int
    hidden: int
    rate: float
    epsilon: float
    chip: str
    uses_sum: bool = False  # whether the sum has a gradient

    @property
    def wide(self) -> int:
        """The elements of a token in a block: a power of two, as Triton requires."""
        return int(pl.next_power_of_2(self.hidden))

    @property
    def chunk(self) -> int:
        """The tokens that a program of the backward kernel adds up."""
        return math.gcd(self.length, 8 * _TOKENS)

    @property
    def is_real(self) -> Array:
        """Booleans `[1, wide]`: the elements of a block that belong to the token."""
        return jax.lax.broadcasted_iota(jnp.int32, (1, self.wide), 1) < self.hidden

    def call(
        self, kernel: Callable[..., None], name: str, tokens: int, inputs: dict[str, Any], outputs: dict[str, str]
    ) -> dict[str, Array]:
        """Runs a kernel for each `tokens` of each row, and returns its outputs by name.

        Args:
          kernel: the kernel.
          name: the name of the kernel.
          tokens: the tokens of a program.
          inputs: {argument of the kernel: (name of a block, array or None)}; None is not passed.
          outputs: {argument of the kernel: name of a block}.
        """
        blocks = {
            "plane": pl.BlockSpec((None, tokens, self.wide), lambda i, j: (i, j, 0)),
            "whole": pl.BlockSpec((self.wide,), lambda i, j: (0,)),
            "sums": pl.BlockSpec((None, None, self.wide), lambda i, j: (i, j, 0)),
            "words": pl.BlockSpec((None, 2), lambda i, j: (i, 0)),
        }
        axes = {"plane": _PLANE, "whole": _WHOLE, "sums": _SUMS, "words": _WORDS}

        def body(*refs: Ref) -> None:
            kernel(self, dict(zip([*inputs, *outputs], refs, strict=True)))

        def run(*arrays: Array) -> Any:
            grid = len(arrays[0]), self.length // tokens
            shapes = {
                "plane": jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype),
                "sums": jax.ShapeDtypeStruct((*grid, self.hidden), jnp.float32),
            }
            pairs = [(block, array) for (block, _), array in zip(inputs.values(), arrays)]
            results = [(block, shapes[block]) for block in outputs.values()]
            warps = max(4, min(16, self.wide // 128))
            options = dict(grid=grid, chip=self.chip, warps=warps, stages=1, name=name)
            return call_on_blocks(gpu_call, body, blocks, pairs, results, **options)

        inputs = {name: pair for name, pair in inputs.items() if pair[1] is not None}
        in_axes, out_axes = [axes[block] for block, _ in inputs.values()], [axes[block] for block in outputs.values()]
        arrays = on_mesh(run, in_axes, out_axes)(*(array for _, array in inputs.values()))
        return dict(zip(outputs, arrays))

    def load(self, ref: Ref, at: Any = slice(None)) -> Array:
        """Loads tokens in float32: `[tokens, wide]`, with zeros after the hidden size."""
        return triton.load(ref.at[at], mask=self.is_real, other=0.0).astype(jnp.float32)

    def vector(self, ref: Ref) -> Array:
        """Loads a vector that all tokens share: `[1, wide]`."""
        return triton.load(ref, mask=self.is_real[0], other=0.0).astype(jnp.float32)[None]

    def store(self, ref: Ref, at: Any, x: Array) -> None:
        """Stores tokens without the elements after the hidden size."""
        triton.store(ref.at[at], x.astype(ref.dtype), mask=self.is_real)

    def drop(self, x: Array, words: Ref, first_token: Any) -> Array:
        """Zeroes and scales up elements `[tokens, wide]`, as `dropout` does."""
        if not self.rate:
            return x
        token, place = (jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in (0, 1))
        index = (jnp.uint32(first_token) + token) * jnp.uint32(self.hidden) + place
        return jnp.where(kept_at((words[0], words[1]), index, self.rate), x * (1 / (1 - self.rate)), 0.0)

    def standardize(self, x: Array) -> tuple[Array, Array]:
        """Returns x with mean 0 and variance 1, and the inverse of its standard deviation."""
        centered = jnp.where(self.is_real, x - x.sum(-1, keepdims=True) * (1 / self.hidden), 0.0)
        inverse = jax.lax.rsqrt((centered * centered).sum(-1, keepdims=True) * (1 / self.hidden) + self.epsilon)
        return centered * inverse, inverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _normalize(
    x: Array,
    update: Array | None,
    update_bias: Array | None,
    scale: Array,
    bias: Array | None,
    words: Array,
    norm: _Norm,
) -> tuple[Array, Array]:
    return _forward(x, update, update_bias, scale, bias, words, norm)[0]


def _forward(
    x: Array,
    update: Array | None,
    update_bias: Array | None,
    scale: Array,
    bias: Array | None,
    words: Array,
    norm: _Norm,
) -> tuple[tuple[Array, Array], Any]:
    inputs = dict(
        x=("plane", x), update=("plane", update), words=("words", words), update_bias=("whole", update_bias),
        scale=("whole", scale), bias=("whole", bias),
    )  # fmt: skip
    outputs = {"normalized": "plane"} if update is None else {"normalized": "plane", "total": "plane"}
    results = norm.call(_forward_kernel, "gpu_norm_forward", _TOKENS, inputs, outputs)
    total = results.get("total", x)
    return (results["normalized"], total), (total, update is not None, update_bias, scale, bias, words)


def _backward(norm: _Norm, saved: Any, gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    total, has_update, update_bias, scale, bias, words = saved
    gradient, of_sum = gradients
    inputs = dict(
        total=("plane", total), gradient=("plane", gradient), of_sum=("plane", of_sum if norm.uses_sum else None),
        words=("words", words), scale=("whole", scale),
    )  # fmt: skip
    outputs = {"of_x": "plane", "of_scale": "sums"}
    outputs |= {} if bias is None else {"of_bias": "sums"}
    outputs |= {"of_update": "plane"} if has_update and norm.rate else {}
    outputs |= {} if update_bias is None else {"of_update_bias": "sums"}
    results = norm.call(_backward_kernel, "gpu_norm_backward", norm.chunk, inputs, outputs)
    sums = {name: results[name].sum((0, 1)) for name, block in outputs.items() if block == "sums"}
    of_update = results.get("of_update", results["of_x"]) if has_update else None
    of_update_bias = None if update_bias is None else sums["of_update_bias"].astype(update_bias.dtype)
    return results["of_x"], of_update, of_update_bias, sums["of_scale"], sums.get("of_bias"), None


_normalize.defvjp(_forward, _backward)


def _forward_kernel(norm: _Norm, refs: dict[str, Ref]) -> None:
    total = norm.load(refs["x"])
    if "update" in refs:
        added = norm.load(refs["update"])
        if "update_bias" in refs:
            added += norm.vector(refs["update_bias"])
        total += norm.drop(added, refs["words"], pl.program_id(1) * _TOKENS)
        total = total.astype(refs["total"].dtype)
        norm.store(refs["total"], slice(None), total)
    y = norm.standardize(total.astype(jnp.float32))[0] * norm.vector(refs["scale"])
    norm.store(refs["normalized"], slice(None), y + norm.vector(refs["bias"]) if "bias" in refs else y)


def _backward_kernel(norm: _Norm, refs: dict[str, Ref]) -> None:
    factor = norm.vector(refs["scale"])
    first, zeros = pl.program_id(1) * norm.chunk, jnp.zeros((_TOKENS, norm.wide), jnp.float32)
    names = [name for name in ("of_scale", "of_bias", "of_update_bias") if name in refs]

    def differentiate(number: Array, sums: Any) -> tuple[Array, ...]:
        start = number * _TOKENS
        at = pl.ds(start, _TOKENS)
        y, inverse = norm.standardize(norm.load(refs["total"], at))
        of_normalized = norm.load(refs["gradient"], at)
        of_y = of_normalized * factor
        mean, mean_with_y = (x.sum(-1, keepdims=True) * (1 / norm.hidden) for x in (of_y, of_y * y))
        of_total = (of_y - mean - y * mean_with_y) * inverse
        if "of_sum" in refs:
            of_total += norm.load(refs["of_sum"], at)
        norm.store(refs["of_x"], at, of_total)
        dropped = of_total
        if "of_update" in refs:
            dropped = norm.drop(of_total, refs["words"], first + start)
            norm.store(refs["of_update"], at, dropped)
        terms = {"of_scale": of_normalized * y, "of_bias": of_normalized, "of_update_bias": dropped}
        return tuple(total + terms[name] for name, total in zip(names, sums))

    sums = jax.lax.fori_loop(0, norm.chunk // _TOKENS, differentiate, (zeros,) * len(names))
    for name, total in zip(names, sums):
        triton.store(refs[name].at[:], total.sum(0), mask=norm.is_real[0])
