"""Dropout, residual sum and LayerNorm as two TPU kernels: one pass over memory forward, one backward."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from bertjax.nn.kernels.pallas import LANES, SUBLANES, is_small, kept, kernel_call, key_words, on_mesh

_PLANE = ("batch", "length", None)
_ROWS = ("batch", None, None)
_WHOLE = (None, None)


def fused_add_norm(x, update, update_bias, scale, bias, dropout_keys, rate: float, epsilon: float, chip: str):
    """LayerNorm(x + dropout(update + update_bias)) over the last axis.

    Args:
      x, update: `[batch, length, hidden]`; length is a multiple of 16, hidden of 128.
      update_bias: `[hidden]`, or None.
      scale, bias: `[hidden]` float32.
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
    return length % (2 * SUBLANES) == 0 and hidden % LANES == 0


class _Norm(NamedTuple):
    """What both kernels need to know."""

    rate: float
    epsilon: float
    chip: str

    def call(self, kernel, shape, name: str, **options):
        batch, length, hidden = shape
        rows, chunk = math.gcd(batch, max(1, 512 // length)), math.gcd(length, self.tokens(hidden))
        parts = length // chunk
        blocks = {
            "words": pl.BlockSpec((rows, 1, 2), lambda i, j: (i, 0, 0)),
            "plane": pl.BlockSpec((rows, chunk, hidden), lambda i, j: (i, j, 0)),
            "whole": pl.BlockSpec((1, hidden), lambda i, j: (0, 0)),
            "sums": pl.BlockSpec((1, SUBLANES, hidden), lambda i, j: (i * parts + j, 0, 0)),
        }
        steps = batch // rows * parts
        for specs in ("in_specs", "out_specs"):
            options[specs] = [blocks[block] for block in options[specs]]
        options["out_shape"] = [
            jax.ShapeDtypeStruct(shape if dtype else (steps, SUBLANES, hidden), dtype or jnp.float32)
            for dtype in options["out_shape"]
        ]
        body = functools.partial(kernel, self, rows)
        return kernel_call(body, grid=(batch // rows, parts), chip=self.chip, name=name, **options)

    def tokens(self, hidden: int) -> int:
        """Tokens at a time; their intermediate results have to fit on the chip."""
        tokens = 512
        while is_small(self.chip) and tokens * hidden > 512 * 768:
            tokens //= 2
        return tokens

    def dropout(self, x, words_ref, row: int):
        if not self.rate:
            return x
        tokens, hidden = x.shape
        mask = kept(words_ref[row], pl.program_id(1) * (tokens * hidden), (hidden, 1), x.shape, self.rate)
        return jnp.where(mask, x * (1 / (1 - self.rate)), 0.0)

    def normalize(self, x):
        """Returns x with mean 0 and variance 1, and the inverse of its standard deviation."""
        centered = x - x.mean(-1, keepdims=True)
        inverse = jax.lax.rsqrt((centered * centered).mean(-1, keepdims=True) + self.epsilon)
        return centered * inverse, inverse


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _add_norm(x, update, update_bias, scale, bias, words, norm: _Norm):
    return _forward(x, update, update_bias, scale, bias, words, norm)[0]


def _forward(x, update, update_bias, scale, bias, words, norm: _Norm):
    def forward(words, x, update, update_bias, scale, bias):
        call = norm.call(
            _forward_kernel,
            x.shape,
            "add_norm_forward",
            in_specs=["words", "plane", "plane", "whole", "whole", "whole"],
            out_specs=["plane", "plane"],
            out_shape=[x.dtype, x.dtype],
        )
        return call(words, x, update, update_bias, scale, bias)

    axes = (_ROWS, _PLANE, _PLANE, _WHOLE, _WHOLE, _WHOLE)
    run = on_mesh(forward, axes, (_PLANE, _PLANE))
    normalized, total = run(words, x, update, update_bias.astype(jnp.float32), scale, bias)
    return normalized, (words, total, scale, update_bias)


def _backward(norm: _Norm, saved, gradient):
    def backward(words, total, scale, gradient):
        call = norm.call(
            _backward_kernel,
            total.shape,
            "add_norm_backward",
            in_specs=["words", "plane", "whole", "plane"],
            out_specs=["plane", "plane", "sums", "sums", "sums"],
            out_shape=[total.dtype, total.dtype, None, None, None],
        )
        return call(words, total, scale, gradient)

    words, total, scale, update_bias = saved
    axes = (_ROWS, _PLANE, _WHOLE, _PLANE)
    run = on_mesh(backward, axes, (_PLANE, _PLANE, _ROWS, _ROWS, _ROWS))
    of_x, of_update, *sums = run(words, total, scale, gradient)
    of_update_bias, of_scale, of_bias = (each.sum((0, 1))[None] for each in sums)
    return of_x, of_update, of_update_bias.astype(update_bias.dtype), of_scale, of_bias, None


_add_norm.defvjp(_forward, _backward)


def _forward_kernel(
    norm: _Norm, rows, words_ref, x_ref, update_ref, update_bias_ref, scale_ref, bias_ref, normalized_ref, total_ref,
):  # fmt: skip
    for row in range(rows):
        update = norm.dropout(update_ref[row].astype(jnp.float32) + update_bias_ref[...], words_ref, row)
        total_ref[row] = (x_ref[row].astype(jnp.float32) + update).astype(total_ref.dtype)
        normalized, _ = norm.normalize(total_ref[row].astype(jnp.float32))
        normalized_ref[row] = (normalized * scale_ref[...] + bias_ref[...]).astype(normalized_ref.dtype)


def _backward_kernel(
    norm: _Norm, rows, words_ref, total_ref, scale_ref, gradient_ref, of_x_ref, of_update_ref, *sums_refs,
):  # fmt: skip
    sums = [0.0, 0.0, 0.0]
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


def _sum_tokens(x):
    """`[tokens, hidden]` -> `[8, hidden]`, to be summed up outside: adding whole registers needs no shuffles."""
    return x.reshape(-1, SUBLANES, x.shape[-1]).sum(0)
