"""LayerNorm, also with dropout and residual sum before it, as two GPU kernels: one pass over memory each way."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from bertjax.config.model_config import Compute
from bertjax.nn.kernels.pallas import key_words, on_mesh
from bertjax.nn.kernels.triton import gpu_call, has_gpu_kernels, kept_at

WIDEST = 2048  # more does not stay in registers
_TOKENS = 4  # a program computes so many at a time
_PLANE = ("batch", "length", None)
_WORDS = ("batch", None)
_SUMS = ("batch", None, None)
_WHOLE = (None,)


def can_norm_on_gpu(compute: Compute, length: int, hidden: int) -> bool:
    """Returns whether the kernels can run on `length` tokens of a hidden size."""
    return has_gpu_kernels(compute) and length % _TOKENS == 0 and hidden <= WIDEST


def gpu_norm(x, scale, bias, epsilon: float, chip: str):
    """LayerNorm(x) over the last axis; see `gpu_add_norm`."""
    norm = _Norm(x.shape[1], x.shape[2], 0.0, epsilon, chip)
    return _normalize(x, None, None, scale, bias, key_words(None, len(x)), norm)[0]


def gpu_add_norm(x, update, update_bias, scale, bias, dropout_keys, rate: float, epsilon: float, chip: str):
    """LayerNorm(x + dropout(update + update_bias)) over the last axis: `[batch, length, hidden]`.

    Args:
      x, update: `[batch, length, hidden]`; length is a multiple of 4.
      update_bias: `[hidden]`, or None.
      scale, bias: `[hidden]` float32; the bias may be None.
      dropout_keys: `[batch]`; None: no dropout.
      rate: the dropout rate.
      epsilon: added to the variance.
      chip: `device_kind`.
    """
    norm = _Norm(x.shape[1], x.shape[2], 0.0 if dropout_keys is None else rate, epsilon, chip)
    return _normalize(x, update, update_bias, scale, bias, key_words(dropout_keys, len(x)), norm)[0]


def gpu_sum_and_norm(x, update, update_bias, scale, bias, dropout_keys, rate: float, epsilon: float, chip: str):
    """Returns x + dropout(update + update_bias) as well, before its LayerNorm; see `gpu_add_norm`."""
    norm = _Norm(x.shape[1], x.shape[2], 0.0 if dropout_keys is None else rate, epsilon, chip, uses_sum=True)
    return _normalize(x, update, update_bias, scale, bias, key_words(dropout_keys, len(x)), norm)[::-1]


class _Norm(NamedTuple):
    """What both kernels need to know."""

    length: int
    hidden: int
    rate: float
    epsilon: float
    chip: str
    uses_sum: bool = False  # the sum has a gradient, too

    @property
    def wide(self) -> int:
        """The elements of a token in a block, which Triton wants to be a power of two."""
        return pl.next_power_of_2(self.hidden)

    @property
    def chunk(self) -> int:
        """Tokens whose sums a program of the backward kernel adds up."""
        return math.gcd(self.length, 8 * _TOKENS)

    @property
    def is_real(self):
        """Tells which elements of a block are the token's, `[1, wide]`."""
        return jax.lax.broadcasted_iota(jnp.int32, (1, self.wide), 1) < self.hidden

    def call(self, kernel, name: str, tokens: int, inputs: dict, outputs: dict) -> dict:
        """Runs a kernel for each `tokens` of each row, and returns its outputs by name.

        Args:
          inputs: {argument of the kernel: (form of a block, array)}; those that are None it does not get.
          outputs: {argument of the kernel: form of a block}.
        """
        form = {
            "plane": pl.BlockSpec((None, tokens, self.wide), lambda i, j: (i, j, 0)),
            "whole": pl.BlockSpec((self.wide,), lambda i, j: (0,)),
            "sums": pl.BlockSpec((None, None, self.wide), lambda i, j: (i, j, 0)),
            "words": pl.BlockSpec((None, 2), lambda i, j: (i, 0)),
        }
        axes = {"plane": _PLANE, "whole": _WHOLE, "sums": _SUMS, "words": _WORDS}

        def body(*refs):
            kernel(self, **dict(zip([*inputs, *outputs], refs, strict=True)))

        def run(*arrays):
            batch = len(arrays[0])
            shapes = {
                "plane": jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype),
                "sums": jax.ShapeDtypeStruct((batch, self.length // tokens, self.hidden), jnp.float32),
            }
            call = gpu_call(
                body,
                grid=(batch, self.length // tokens),
                in_specs=[form[each] for each, _ in inputs.values()],
                out_specs=[form[each] for each in outputs.values()],
                out_shape=[shapes[each] for each in outputs.values()],
                chip=self.chip,
                warps=max(4, min(16, self.wide // 128)),
                stages=1,
                name=name,
            )
            return call(*arrays)

        inputs = {name: pair for name, pair in inputs.items() if pair[1] is not None}
        run = on_mesh(run, [axes[each] for each, _ in inputs.values()], [axes[each] for each in outputs.values()])
        return dict(zip(outputs, run(*(array for _, array in inputs.values()))))

    def load(self, ref, at=slice(None)):
        """Loads tokens in float32: `[tokens, wide]`, with zeros after the hidden size."""
        return triton.load(ref.at[at], mask=self.is_real, other=0.0).astype(jnp.float32)

    def vector(self, ref):
        """Loads what is the same for all tokens: `[1, wide]`."""
        return triton.load(ref, mask=self.is_real[0], other=0.0).astype(jnp.float32)[None]

    def store(self, ref, at, x):
        triton.store(ref.at[at], x.astype(ref.dtype), mask=self.is_real)

    def drop(self, x, words, first_token):
        """Zeroes and scales up elements `[tokens, wide]`, as `dropout` does."""
        if not self.rate:
            return x
        token, place = (jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in (0, 1))
        index = (jnp.uint32(first_token) + token) * jnp.uint32(self.hidden) + place
        return jnp.where(kept_at((words[0], words[1]), index, self.rate), x * (1 / (1 - self.rate)), 0.0)

    def standardize(self, x):
        """Returns x with mean 0 and variance 1, and the inverse of its standard deviation."""
        centered = jnp.where(self.is_real, x - x.sum(-1, keepdims=True) * (1 / self.hidden), 0.0)
        inverse = jax.lax.rsqrt((centered * centered).sum(-1, keepdims=True) * (1 / self.hidden) + self.epsilon)
        return centered * inverse, inverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _normalize(x, update, update_bias, scale, bias, words, norm: _Norm):
    return _forward(x, update, update_bias, scale, bias, words, norm)[0]


def _forward(x, update, update_bias, scale, bias, words, norm: _Norm):
    inputs = dict(
        x=("plane", x), update=("plane", update), words=("words", words), update_bias=("whole", update_bias),
        scale=("whole", scale), bias=("whole", bias),
    )  # fmt: skip
    outputs = {"normalized": "plane"} if update is None else {"normalized": "plane", "total": "plane"}
    found = norm.call(_forward_kernel, "gpu_norm_forward", _TOKENS, inputs, outputs)
    total = found.get("total", x)
    return (found["normalized"], total), (total, update is not None, update_bias, scale, bias, words)


def _backward(norm: _Norm, saved, gradients):
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
    found = norm.call(_backward_kernel, "gpu_norm_backward", norm.chunk, inputs, outputs)
    sums = {name: found[name].sum((0, 1)) for name, form in outputs.items() if form == "sums"}
    of_update = found.get("of_update", found["of_x"]) if has_update else None
    of_update_bias = None if update_bias is None else sums["of_update_bias"].astype(update_bias.dtype)
    return found["of_x"], of_update, of_update_bias, sums["of_scale"], sums.get("of_bias"), None


_normalize.defvjp(_forward, _backward)


def _forward_kernel(norm: _Norm, x, words, scale, normalized, update=None, update_bias=None, bias=None, total=None):
    sums = norm.load(x)
    if update is not None:
        added = norm.load(update)
        if update_bias is not None:
            added += norm.vector(update_bias)
        sums = (sums + norm.drop(added, words, pl.program_id(1) * _TOKENS)).astype(total.dtype)
        norm.store(total, slice(None), sums)
    y = norm.standardize(sums.astype(jnp.float32))[0] * norm.vector(scale)
    norm.store(normalized, slice(None), y if bias is None else y + norm.vector(bias))


def _backward_kernel(
    norm: _Norm, total, gradient, words, scale, of_x, of_scale, of_sum=None, of_bias=None, of_update=None,
    of_update_bias=None,
):  # fmt: skip
    factor = norm.vector(scale)
    first, zeros = pl.program_id(1) * norm.chunk, jnp.zeros((_TOKENS, norm.wide), jnp.float32)
    refs = [ref for ref in (of_scale, of_bias, of_update_bias) if ref is not None]

    def differentiate(number, sums):
        start = number * _TOKENS
        at = pl.ds(start, _TOKENS)
        y, inverse = norm.standardize(norm.load(total, at))
        of_normalized = norm.load(gradient, at)
        of_y = of_normalized * factor
        mean, mean_with_y = (each.sum(-1, keepdims=True) * (1 / norm.hidden) for each in (of_y, of_y * y))
        found = (of_y - mean - y * mean_with_y) * inverse
        if of_sum is not None:
            found += norm.load(of_sum, at)
        norm.store(of_x, at, found)
        dropped = found
        if of_update is not None:
            dropped = norm.drop(found, words, first + start)
            norm.store(of_update, at, dropped)
        terms = [of_normalized * y]
        terms += [] if of_bias is None else [of_normalized]
        terms += [] if of_update_bias is None else [dropped]
        return tuple(a + b for a, b in zip(sums, terms))

    sums = jax.lax.fori_loop(0, norm.chunk // _TOKENS, differentiate, (zeros,) * len(refs))
    for ref, each in zip(refs, sums):
        triton.store(ref.at[:], each.sum(0), mask=norm.is_real[0])
