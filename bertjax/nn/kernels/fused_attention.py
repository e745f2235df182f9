"""Self-attention as two TPU kernels: scores, mask, softmax and dropout never leave the chip.

A grid step processes some rows of the batch, and the heads that share 128 lanes. Scores are transposed, `[keys,
queries]`: softmax then reduces over sublanes, which needs no shuffles, and its statistics are rows. The backward kernel
recomputes probabilities and dropout masks (a hash of row, head, query and key).
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bertjax.nn.kernels.pallas import (  # fmt: skip
    LANES,
    ZERO,
    Ref,
    call_on_blocks,
    dot,
    kept,
    kernel_call,
    key_words,
    on_mesh,
    only_head,
    own_lanes,
    transposed,
    with_first_head,
)

LONGEST = 1024  # tokens; with 2048 the intermediate results of the backward kernel do not fit on a v4 or v5e
_MASKED = -1e30
_PLANES = ("batch", None, "length", "heads")  # [batch, 3, length, heads * size]
_PLANE = ("batch", "length", "heads")
_ROWS = ("batch", None, None)
_LOG_SUMS = ("batch", "heads", None, "length")


def fused_attention(
    x: Array,
    kernel: Array,
    bias: Array,
    segments: Array,
    dropout_keys: Array | None,
    rate: float,
    chip: str,
    unroll: bool = False,
    causal: bool = False,
) -> Array:
    """Projects to queries, keys and values; softmax(Q K^T / sqrt(size)) V within segments, with dropout on the softmax.

    The backward pass projects again: on TPUs this is faster than to store and read three projections. In unrolled
    layers the compiler detects the common expressions, and keeps the projections.

    Args:
      x: `[batch, length, hidden]`; length is a multiple of 128, at most `LONGEST`.
      kernel: `[hidden, 3, heads, size]` of the projections. 128 is a multiple of size, and heads * size on each device
        is a multiple of 128.
      bias: `[3, heads, size]` of the projections.
      segments: `[batch, length]` int32; see `visible`.
      dropout_keys: `[batch]`; None: no dropout.
      rate: the dropout rate.
      chip: `device_kind`.
      unroll: whether the layers are compiled one by one.
      causal: tokens attend to earlier tokens and to themselves.

    Returns:
      `[batch, length, heads * size]`.
    """
    hidden, _, heads, size = kernel.shape
    attention = FusedAttention(x.shape[1], size, 0.0 if dropout_keys is None else rate, chip, unroll, causal)
    kernel, bias = kernel.reshape(hidden, 3, heads * size), bias.reshape(3, heads * size)
    return _attend(x, kernel, bias, segments, key_words(dropout_keys, len(x))[:, None], attention)


class FusedAttention(NamedTuple):
    """The settings of both kernels."""

    length: int
    size: int  # of a head
    rate: float
    chip: str
    unroll: bool = False  # layers are compiled one by one, as in `Compute`
    causal: bool = False

    @property
    def heads(self) -> int:
        """Heads of a grid step."""
        return LANES // self.size

    @property
    def chunk(self) -> int:
        """Queries (forward) or keys (backward) at a time. The scores must fit on the chip."""
        return math.gcd(self.length, 512)

    @property
    def scale(self) -> float:
        """The factor of the scores, for powers of two instead of e."""
        return math.log2(math.e) / math.sqrt(self.size)

    def rows(self, batch: int) -> int:
        """Returns the rows of the batch in a grid step."""
        return math.gcd(batch, max(1, 1024 // self.length))

    def call(
        self,
        kernel: Callable[..., None],
        name: str,
        planes: Array,
        segments: Array,
        words: Array,
        saved: Sequence[Any],
        outputs: Sequence[Any],
        **options: Any,
    ) -> Any:
        """Runs a kernel on the part of a device; `saved` and `outputs` as in `call_on_blocks`."""
        batch, _, length, width = planes.shape
        rows = self.rows(batch)
        blocks = {
            "words": pl.BlockSpec((rows, 1, 3), lambda i, j: (i, 0, 0)),
            "row": pl.BlockSpec((rows, 1, self.length), lambda i, j: (i, 0, 0)),
            "column": pl.BlockSpec((rows, self.length, 1), lambda i, j: (i, 0, 0)),
            "plane": pl.BlockSpec((rows, self.length, LANES), lambda i, j: (i, 0, j)),
            "planes": pl.BlockSpec((3 * rows, self.length, LANES), lambda i, j: (i, 0, j)),
            "bias": pl.BlockSpec((1, 3, LANES), lambda i, j: (i, 0, j)),
            "log_sums": pl.BlockSpec((rows, self.heads, 1, self.length), lambda i, j: (i, j, 0, 0)),
        }
        inputs = [
            ("words", with_first_head(words, width // self.size)),
            ("row", segments[:, None, :]),
            ("column", segments[:, :, None]),
            ("planes", planes.reshape(-1, length, width)),
            *saved,
        ]
        body, grid = functools.partial(kernel, self, rows), (batch // rows, width // LANES)
        options |= dict(grid=grid, chip=self.chip, name=name)
        return call_on_blocks(kernel_call, body, blocks, inputs, outputs, **options)

    def visible(self, keys: Array, queries: Array, first_key: int, first_query: int) -> Array:
        """Returns booleans `[keys, queries]` from segments `[keys, 1]` and `[1, queries]`."""
        same = keys == queries
        if not self.causal:
            return same
        key, query = (jax.lax.broadcasted_iota(jnp.int32, same.shape, axis) for axis in (0, 1))
        return same & (first_key + key <= first_query + query)

    def kept(
        self, words_ref: Ref, row: int, head: int, first_key: int, first_query: int, shape: tuple[int, ...]
    ) -> Array:
        """Returns booleans `[keys, queries]`: the probabilities that dropout keeps."""
        words = words_ref[row]  # the third word is the first head of the device
        head = words[:, 2:].astype(jnp.int32) + (pl.program_id(1) * self.heads + head)
        start = (head * self.length + first_query) * self.length + first_key
        return kept(words, start, (1, self.length), shape, self.rate)


def attention_forward(planes: Array, segments: Array, words: Array, attention: FusedAttention) -> tuple[Array, Array]:
    """Runs the forward kernel.

    Args:
      planes: `[batch, 3, length, heads * size]` queries, keys and values.
      segments: `[batch, length]` int32.
      words: `[batch, 1, 2]` uint32 of the dropout keys.
      attention: the settings.

    Returns:
      The context `[batch, length, heads * size]`, and the binary logarithm of the denominator of softmax for each query
      `[batch, heads, 1, length]`.
    """

    def run(planes: Array, segments: Array, words: Array) -> Any:
        batch, _, length, width = planes.shape
        context = jax.ShapeDtypeStruct((batch, length, width), planes.dtype)
        log_sums = jax.ShapeDtypeStruct((batch, width // attention.size, 1, length), jnp.float32)
        outputs = [("plane", context), ("log_sums", log_sums)]
        return attention.call(_forward_kernel, "attention_forward", planes, segments, words, (), outputs)

    axes = (_PLANES, ("batch", "length"), _ROWS)
    return on_mesh(run, axes, (_PLANE, _LOG_SUMS))(planes, segments, words)


def attention_backward(
    planes: Array,
    segments: Array,
    words: Array,
    context: Array,
    log_sums: Array,
    of_context: Array,
    attention: FusedAttention,
) -> tuple[Array, Array]:
    """Returns the gradients of the planes, and their sums `[n, 3, heads * size]` over parts of the tokens."""

    def run(planes: Array, segments: Array, words: Array, *saved: Array) -> Any:
        batch, _, length, width = planes.shape
        of_planes = jax.ShapeDtypeStruct((3 * batch, length, width), planes.dtype)
        of_bias = jax.ShapeDtypeStruct((batch // attention.rows(batch), 3, width), jnp.float32)
        of_planes, of_bias = attention.call(
            _backward_kernel,
            "attention_backward",
            planes,
            segments,
            words,
            list(zip(("plane", "log_sums", "plane"), saved, strict=True)),
            [("planes", of_planes), ("bias", of_bias)],
            scratch_shapes=[pltpu.VMEM((LANES, length), jnp.float32)],
        )
        return of_planes.reshape(planes.shape), of_bias

    axes = (_PLANES, ("batch", "length"), _ROWS, _PLANE, _LOG_SUMS, _PLANE)
    run_on_mesh = on_mesh(run, axes, (_PLANES, ("batch", None, "heads")))
    return run_on_mesh(planes, segments, words, context, log_sums, of_context)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(x: Array, kernel: Array, bias: Array, segments: Array, words: Array, attention: FusedAttention) -> Array:
    return _attend_forward(x, kernel, bias, segments, words, attention)[0]


def _project(x: Array, kernel: Array, bias: Array, unroll: bool) -> Array:
    """`[batch, length, hidden]` -> `[batch, 3, length, heads * size]`."""
    if unroll:  # a transpose after the sum costs nothing: the product writes the form that the kernel reads
        planes = jnp.moveaxis(jnp.tensordot(x, kernel, 1) + bias, 2, 1)
    else:  # in a scan the copy of the transpose stays on chip, and the program is a tenth faster
        planes = jnp.einsum("ble,enf->bnlf", x, kernel) + bias[:, None, :]
    return nn.with_logical_constraint(planes, _PLANES)


def _attend_forward(
    x: Array, kernel: Array, bias: Array, segments: Array, words: Array, attention: FusedAttention
) -> tuple[Array, Any]:
    planes = _project(x, kernel, bias, attention.unroll)
    context, log_sums = attention_forward(planes, segments, words, attention)
    return context, (x, kernel, bias, segments, words, context, log_sums)


def _attend_backward(attention: FusedAttention, saved: Any, of_context: Array) -> tuple[Any, ...]:
    x, kernel, bias, segments, words, context, log_sums = saved
    planes, of_product = jax.vjp(lambda x, kernel: _project(x, kernel, bias, attention.unroll), x, kernel)
    of_planes, of_bias = attention_backward(planes, segments, words, context, log_sums, of_context, attention)
    return *of_product(of_planes), of_bias.sum(0).astype(bias.dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward_kernel(attention: FusedAttention, rows: int, *refs: Ref) -> None:
    words_ref, row_ref, column_ref, planes_ref, context_ref, log_sums_ref = refs
    size, chunk, dtype = attention.size, attention.chunk, planes_ref.dtype
    for row, first in itertools.product(range(rows), range(0, attention.length, chunk)):
        at = pl.ds(first, chunk)
        visible = attention.visible(column_ref[row], row_ref[row, :, at], 0, first)
        queries = transposed(planes_ref[3 * row, at, :])
        keys, values = planes_ref[3 * row + 1], transposed(planes_ref[3 * row + 2])
        outputs = []
        for head in range(attention.heads):
            scores = dot(keys, only_head(head, size, queries).astype(dtype))
            scores = jnp.where(visible, scores, _MASKED) * attention.scale
            largest = scores.max(0, keepdims=True)
            probs = jnp.exp2(scores - largest)
            sums = probs.sum(0, keepdims=True)
            if attention.rate:
                probs = jnp.where(attention.kept(words_ref, row, head, 0, first, probs.shape), probs, ZERO)
            values_of_head = values[head * size : (head + 1) * size].astype(dtype)
            outputs.append(dot(values_of_head, probs.astype(dtype)) * (1 / (sums * (1 - attention.rate))))
            log_sums_ref[row, head, :, at] = largest + jnp.log2(sums)
        context_ref[row, at, :] = jnp.concatenate(outputs).T.astype(dtype)


def _backward_kernel(attention: FusedAttention, rows: int, *refs: Ref) -> None:
    words_ref, row_ref, column_ref, planes_ref, context_ref, log_sums_ref, of_context_ref, *outputs = refs
    of_planes_ref, of_bias_ref, of_queries_ref = outputs
    size, chunk, dtype = attention.size, attention.chunk, planes_ref.dtype
    scale, keep = 1 / math.sqrt(size), 1 - attention.rate
    of_bias_ref[...] = jnp.zeros_like(of_bias_ref)

    def write(row: int, part: int, at: Any, gradient: Array) -> None:
        of_planes_ref[3 * row + part, at, :] = gradient.astype(dtype)
        of_bias_ref[0, part : part + 1] += gradient.sum(0, keepdims=True)

    for row in range(rows):
        queries, of_context = planes_ref[3 * row], of_context_ref[row]
        queries_t, of_context_t = transposed(queries), transposed(of_context)
        products = of_context_t * transposed(context_ref[row])
        for first in range(0, attention.length, chunk):
            at = pl.ds(first, chunk)
            visible = attention.visible(column_ref[row, at, :], row_ref[row], first, 0)
            keys, values = planes_ref[3 * row + 1, at, :], planes_ref[3 * row + 2, at, :]
            keys_t = transposed(keys)
            of_queries, of_keys, of_values = [], [], []
            for head in range(attention.heads):
                lanes = slice(head * size, (head + 1) * size)
                scores = dot(keys, only_head(head, size, queries_t).astype(dtype))
                scores = jnp.where(visible, scores, _MASKED) * attention.scale
                probs = dropped = jnp.exp2(scores - log_sums_ref[row, head])
                of_probs = dot(values, (only_head(head, size, of_context_t) * (1 / keep)).astype(dtype))
                if attention.rate:
                    mask = attention.kept(words_ref, row, head, first, 0, probs.shape)
                    dropped, of_probs = jnp.where(mask, probs, ZERO), jnp.where(mask, of_probs, ZERO)
                # The sum of probs * of_probs over keys equals the sum of context * of_context over a head.
                of_scores = (probs * (of_probs - products[lanes].sum(0, keepdims=True))).astype(dtype)
                of_values.append(dot(dropped.astype(dtype), of_context))
                of_keys.append(dot(of_scores, queries))
                of_queries.append(dot(keys_t[lanes].astype(dtype), of_scores))
            write(row, 1, at, own_lanes(of_keys, size) * scale)
            write(row, 2, at, own_lanes(of_values, size) * (1 / keep))
            part = jnp.concatenate(of_queries)
            of_queries_ref[...] = part if first == 0 else of_queries_ref[...] + part
        write(row, 0, slice(None), (of_queries_ref[...] * scale).T)
