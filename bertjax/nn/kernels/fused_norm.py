"""Dropout, residual sum and LayerNorm as two TPU kernels with one pass over memory each."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from bertjax.nn.kernels.pallas import (
    LANES,
    SUBLANES,
    Ref,
    call_on_blocks,
    is_small,
    kept,
    kernel_call,
    key_words,
    on_mesh,
)

_ROWS = ("batch", None, None)
_AXES = {"words": _ROWS, "plane": ("batch", "length", None), "whole": (None, None), "sums": _ROWS}  # by block


def fused_add_norm(
    x: Array,
    update: Array,
    update_bias: Array | None,
    scale: Array,
    bias: Array,
    dropout_keys: Array | None,
    rate: float,
    epsilon: float,
    chip: str,
) -> Array:
    """LayerNorm(x + dropout(update + update_bias)) over the last axis.

    Args:
      x: `[batch, length, hidden]`; length is a multiple of 16, hidden of 128.
      update: `[batch, length, hidden]`.
      update_bias: `[hidden]`, or None.
      scale: `[hidden]` float32.
      bias: `[hidden]` float32.
      dropout_keys: `[batch]`; None: no dropout.
      rate: the dropout rate.
      epsilon: added to the variance.
      chip: `device_kind`.
    """
    norm = _Norm(0.0 if dropout_keys is None else rate, epsilon, chip)
    update_bias = jnp.zeros_like(bias) if update_bias is None else update_bias
    words = key_words(dropout_keys, len(x))[:, None]
    return _add_norm(x, update, update_bias[None], scale[None], bias[None], words, norm)


def can_add_norm(length: int, hidden: int) -> bool:
    """Returns whether the kernels support `length` tokens of a hidden size."""
    return length % (2 * SUBLANES) == 0 and hidden % LANES == 0


class _Norm(NamedTuple):
    """The settings of both kernels."""

    rate: float
    epsilon: float
    chip: str

    def call(self, kernel: Callable[..., None], name: str, inputs: list[Any], outputs: list[str]) -> Any:
        """Runs a kernel on the parts of the devices.

        Args:
          kernel: the kernel.
          name: the name of the kernel.
          inputs: pairs of the name of a block and an array; the second array is a plane.
          outputs: the names of blocks.
        """
        names = [block for block, _ in inputs]

        def run(*arrays: Array) -> Any:
            return self._call_on_device(kernel, name, list(zip(names, arrays)), outputs)

        run_on_mesh = on_mesh(run, [_AXES[block] for block in names], [_AXES[block] for block in outputs])
        return run_on_mesh(*(array for _, array in inputs))

    def _call_on_device(self, kernel: Callable[..., None], name: str, inputs: list[Any], outputs: list[str]) -> Any:
        plane = inputs[1][1]
        batch, length, hidden = plane.shape
        rows, chunk = math.gcd(batch, max(1, 512 // length)), math.gcd(length, self.tokens(hidden))
        parts = length // chunk
        blocks = {
            "words": pl.BlockSpec((rows, 1, 2), lambda i, j: (i, 0, 0)),
            "plane": pl.BlockSpec((rows, chunk, hidden), lambda i, j: (i, j, 0)),
            "whole": pl.BlockSpec((1, hidden), lambda i, j: (0, 0)),
            "sums": pl.BlockSpec((1, SUBLANES, hidden), lambda i, j: (i * parts + j, 0, 0)),
        }
        shapes = {
            "plane": jax.ShapeDtypeStruct(plane.shape, plane.dtype),
            "sums": jax.ShapeDtypeStruct((batch // rows * parts, SUBLANES, hidden), jnp.float32),
        }
        body, results = functools.partial(kernel, self, rows), [(block, shapes[block]) for block in outputs]
        options = dict(grid=(batch // rows, parts), chip=self.chip, name=name)
        return call_on_blocks(kernel_call, body, blocks, inputs, results, **options)

    def tokens(self, hidden: int) -> int:
        """Returns the number of tokens at a time, whose intermediate results must fit on the chip."""
        tokens = 512
        while is_small(self.chip) and tokens * hidden > 512 * 768:
            tokens //= 2
        return tokens

    def dropout(self, x: Array, words_ref: Ref, row: int) -> Array:
        """Zeroes and scales up elements `[tokens, hidden]`, as `ops.dropout` does."""
        if not self.rate:
            return x
        tokens, hidden = x.shape
        mask = kept(words_ref[row], pl.program_id(1) * (tokens * hidden), (hidden, 1), x.shape, self.rate)
        return jnp.where(mask, x * (1 / (1 - self.rate)), 0.0)

    def normalize(self, x: Array) -> tuple[Array, Array]:
        """Returns x with mean 0 and variance 1, and the inverse of its standard deviation."""
        centered = x - x.mean(-1, keepdims=True)
        inverse = jax.lax.rsqrt((centered * centered).mean(-1, keepdims=True) + self.epsilon)
        return centered * inverse, inverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _add_norm(
    x: Array, update: Array, update_bias: Array, scale: Array, bias: Array, words: Array, norm: _Norm
) -> Array:
    return _forward(x, update, update_bias, scale, bias, words, norm)[0]


def _forward(
    x: Array, update: Array, update_bias: Array, scale: Array, bias: Array, words: Array, norm: _Norm
) -> tuple[Array, Any]:
    inputs = [("words", words), ("plane", x), ("plane", update)]
    inputs += [("whole", vector) for vector in (update_bias.astype(jnp.float32), scale, bias)]
    normalized, total = norm.call(_forward_kernel, "add_norm_forward", inputs, ["plane", "plane"])
    return normalized, (words, total, scale, update_bias)


def _backward(norm: _Norm, saved: Any, gradient: Array) -> tuple[Any, ...]:
    words, total, scale, update_bias = saved
    inputs = [("words", words), ("plane", total), ("whole", scale), ("plane", gradient)]
    outputs = ["plane", "plane", "sums", "sums", "sums"]
    of_x, of_update, *sums = norm.call(_backward_kernel, "add_norm_backward", inputs, outputs)
    of_update_bias, of_scale, of_bias = (x.sum((0, 1))[None] for x in sums)
    return of_x, of_update, of_update_bias.astype(update_bias.dtype), of_scale, of_bias, None


_add_norm.defvjp(_forward, _backward)


def _forward_kernel(norm: _Norm, rows: int, *refs: Ref) -> None:
    words_ref, x_ref, update_ref, update_bias_ref, scale_ref, bias_ref, normalized_ref, total_ref = refs
    for row in range(rows):
        update = norm.dropout(update_ref[row].astype(jnp.float32) + update_bias_ref[...], words_ref, row)
        total_ref[row] = (x_ref[row].astype(jnp.float32) + update).astype(total_ref.dtype)
        normalized, _ = norm.normalize(total_ref[row].astype(jnp.float32))
        normalized_ref[row] = (normalized * scale_ref[...] + bias_ref[...]).astype(normalized_ref.dtype)


def _backward_kernel(norm: _Norm, rows: int, *refs: Ref) -> None:
    words_ref, total_ref, scale_ref, gradient_ref, of_x_ref, of_update_ref, *sums_refs = refs
    sums: list[Any] = [0.0, 0.0, 0.0]
    for row in range(rows):
        normalized, inverse = norm.normalize(total_ref[row].astype(jnp.float32))
        gradient = gradient_ref[row].astype(jnp.float32)
        scaled = gradient * scale_ref[...]
        along = (scaled * normalized).mean(-1, keepdims=True)
        of_total = (scaled - scaled.mean(-1, keepdims=True) - normalized * along) * inverse
        of_update = norm.dropout(of_total, words_ref, row)
        of_x_ref[row] = of_total.astype(of_x_ref.dtype)
        of_update_ref[row] = of_update.astype(of_update_ref.dtype)
        parts = (of_update, gradient * normalized, gradient)  # gradients of update_bias, scale, bias
        sums = [total + _sum_tokens(part) for total, part in zip(sums, parts)]
    for ref, total in zip(sums_refs, sums):
        ref[0] = total


def _sum_tokens(x: Array) -> Array:
    """`[tokens, hidden]` -> `[8, hidden]`, whose sum is computed outside: adding whole registers needs no shuffles."""
    return x.reshape(-1, SUBLANES, x.shape[-1]).sum(0)
