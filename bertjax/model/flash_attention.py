"""Self-attention over long texts as two TPU kernels: of all tokens of a segment, or of those within a window.

Scores exist a piece at a time (FlashAttention; Dao et al. 2022), as `[keys, queries]`: then softmax reduces over
sublanes, and its statistics are rows. A piece that no token sees is not computed, be it outside the window or in other
segments. Each grid step takes the heads that share 128 lanes.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bertjax.model.kernels import (
    LANES,
    dot,
    is_small,
    kernel_call,
    on_mesh,
    only_head,
    own_lanes,
    parts_along,
    transposed,
)

LONGEST = 8192  # tokens; queries, their gradients and those of the context lie on chip
LONGEST_BLOCK = 512  # queries or keys of a grid step
_MASKED = -1e30
_PLANE = ("batch", "length", "heads")  # [batch, length, heads * size]
_ROW = ("batch", None, "length")
_OF_HEADS = ("batch", "heads", None, "length")


class Bounds(NamedTuple):
    """The first and the last token that each token sees, `[batch, 1, length]` int32."""

    first: jax.Array
    last: jax.Array


def bounds_of(segments: jax.Array, window: int | None = None) -> Bounds:
    """Returns what tokens see: their segment, whose tokens lie side by side, and of it those in the window.

    Args:
      segments: `[batch, length]` int32.
      window: how many places away a token sees, to either side; None: any number.
    """
    places = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    differs = segments[:, 1:] != segments[:, :-1]
    begins, ends = (jnp.pad(differs, [(0, 0), pad], constant_values=True) for pad in ((1, 0), (0, 1)))
    first = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, places, segments.shape[1]), axis=1, reverse=True)
    if window is not None:
        first, last = jnp.maximum(first, places - window), jnp.minimum(last, places + window)
    return Bounds(first[:, None], last[:, None])


def can_flash(length: int, width: int, size: int) -> bool:
    """Returns whether the kernels can run on `length` tokens, and heads of a `size` that are `width` together.

    Fewer than 128 tokens would be padding for the most part.
    """
    width //= parts_along("heads")
    return LANES <= length <= LONGEST and width % LANES == 0 and LANES % size == 0


def padded(length: int) -> int:
    """Returns how many tokens the kernels run on: whole lanes, and in long rows whole blocks."""
    whole = LANES if length <= LONGEST_BLOCK else LONGEST_BLOCK
    return -(-length // whole) * whole


def flash_attention(query, key, value, segments, size: int, chip: str, window: int | None = None):
    """softmax(Q K^T / sqrt(size)) V within segments and the window.

    Args:
      query, key, value: `[batch, length, heads * size]`, for which `can_flash` holds.
      segments, window: see `bounds_of`.
      chip: `device_kind`.

    Returns:
      `[batch, length, heads * size]`.
    """
    length = query.shape[1]
    missing = [(0, 0), (0, padded(length) - length)]
    segments = jnp.pad(segments, missing, constant_values=-1)  # padding, in a segment of its own
    query, key, value = (jnp.pad(plane, [*missing, (0, 0)]) for plane in (query, key, value))
    flash = Flash(query.shape[1], size, window, chip)
    return _attend(query, key, value, bounds_of(segments, window), flash)[:, :length]


class Flash(NamedTuple):
    """What both kernels need to know."""

    length: int  # of rows, `padded`
    size: int  # a head's size
    window: int | None
    chip: str

    @property
    def heads(self) -> int:
        """Heads of a grid step."""
        return LANES // self.size

    @property
    def block(self) -> int:
        """Queries (forward) or keys (backward) of a row in a grid step."""
        return math.gcd(self.length, LONGEST_BLOCK // 2 if is_small(self.chip) else LONGEST_BLOCK)

    @property
    def reach(self) -> int:
        """The window in whole lanes."""
        return self.length if self.window is None else min(self.length, -(-self.window // LANES) * LANES)

    @property
    def is_local(self) -> bool:
        """Whether a piece has all that a chunk of 128 tokens sees."""
        return LANES + 2 * self.reach <= min(1024, self.length)

    @property
    def chunk(self) -> int:
        """Queries (forward) or keys (backward) at a time."""
        return LANES if self.is_local else self.block

    @property
    def piece(self) -> int:
        """Keys (forward) or queries (backward) that a chunk meets at a time."""
        return LANES + 2 * self.reach if self.is_local else self.block

    @property
    def pieces(self) -> int:
        """How many pieces a chunk meets, at most: in a row of one segment."""
        return 1 if self.is_local else self.length // self.piece

    @property
    def scale(self) -> float:
        """The factor of the scores, for powers of two instead of e."""
        return math.log2(math.e) / math.sqrt(self.size)

    def rows(self, batch: int) -> int:
        """Rows of the batch of a grid step."""
        return math.gcd(batch, max(1, LONGEST_BLOCK // self.length))

    def name(self, kernel: str) -> str:
        return f"flash_{kernel}" if self.window is None else f"flash_{kernel}_{self.window}"

    @staticmethod
    def window_of(name: str) -> int | None:
        """The window of a kernel with this name."""
        window = name.rpartition("_")[2]
        return int(window) if window.isdecimal() else None

    def meet(self, first_of_chunk, bounds: Bounds, step, carry):
        """Runs `carry = step(first token of the piece, carry)` over the pieces that a chunk meets.

        `bounds` are those of the chunk's tokens, `[1, chunk]`.
        """
        if self.is_local:
            first = jnp.clip(first_of_chunk - self.reach, 0, self.length - self.piece)
            return step(pl.multiple_of(first, LANES), carry)
        if self.pieces == 1:
            return step(0, carry)
        # The places as floats: the vector unit reduces those.
        first = jax.lax.div(bounds.first.astype(jnp.float32).min().astype(jnp.int32), self.piece)
        last = jax.lax.div(bounds.last.astype(jnp.float32).max().astype(jnp.int32), self.piece)
        return jax.lax.fori_loop(
            first, last + 1, lambda i, carry: step(pl.multiple_of(i * self.piece, LANES), carry), carry
        )

    def blocks(self, rows: int) -> dict[str, pl.BlockSpec]:
        """The parts of arrays that a grid step `(rows of the batch, heads, block of tokens)` has."""
        once = pl.Buffered(1) if is_small(self.chip) else None
        return {
            "plane": pl.BlockSpec((rows, self.block, LANES), lambda i, j, k: (i, k, j)),
            "whole_plane": pl.BlockSpec((rows, self.length, LANES), lambda i, j, k: (i, 0, j), pipeline_mode=once),
            "row": pl.BlockSpec((rows, 1, self.block), lambda i, j, k: (i, 0, k)),
            "whole_row": pl.BlockSpec((rows, 1, self.length), lambda i, j, k: (i, 0, 0)),
            "of_heads": pl.BlockSpec((rows, self.heads, 1, self.block), lambda i, j, k: (i, j, 0, k)),
            "whole_of_heads": pl.BlockSpec((rows, self.heads, 1, self.length), lambda i, j, k: (i, j, 0, 0)),
        }

    def call(self, kernel, name: str, inputs, outputs, in_order: bool, **options):
        """Runs a kernel; `inputs`, `outputs`: pairs of a block's name and an array, or its shape and type."""
        batch, length, width = inputs[0][1].shape
        rows = self.rows(batch)
        blocks = self.blocks(rows)
        call = kernel_call(
            functools.partial(kernel, self, rows),
            grid=(batch // rows, width // LANES, length // self.block),
            in_order=1 if in_order else 0,
            chip=self.chip,
            name=self.name(name),
            in_specs=[blocks[block] for block, _ in inputs],
            out_specs=[blocks[block] for block, _ in outputs],
            out_shape=[shape for _, shape in outputs],
            **options,
        )
        return call(*(array for _, array in inputs))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(query, key, value, bounds: Bounds, flash: Flash):
    return _attend_forward(query, key, value, bounds, flash)[0]


def _attend_forward(query, key, value, bounds, flash):
    def run(query, key, value, first, last):
        batch, length, width = query.shape
        log_sums = jax.ShapeDtypeStruct((batch, width // flash.size, 1, length), jnp.float32)
        blocks = ("plane", "whole_plane", "whole_plane", "row", "row")
        return flash.call(
            _forward_kernel,
            "forward",
            list(zip(blocks, (query, key, value, first, last), strict=True)),
            [("plane", jax.ShapeDtypeStruct(query.shape, query.dtype)), ("of_heads", log_sums)],
            in_order=False,
        )

    run_on_mesh = on_mesh(run, (_PLANE, _PLANE, _PLANE, _ROW, _ROW), (_PLANE, _OF_HEADS))
    context, log_sums = run_on_mesh(query, key, value, *bounds)
    return context, (query, key, value, bounds, context, log_sums)


def _attend_backward(flash, saved, of_context):
    query, key, value, bounds, context, log_sums = saved

    def run(query, key, value, context, of_context, first, last, log_sums):
        batch, length, width = query.shape
        # Softmax's gradient subtracts the sum over keys of probs * of_probs, which is that of context * of_context over
        # a head's elements. As a product with ones and zeros, they stay where they lie.
        own = jnp.equal(jnp.arange(width)[:, None] // flash.size, jnp.arange(width // flash.size)).astype(jnp.float32)
        products = context.astype(jnp.float32) * of_context.astype(jnp.float32)
        products = jnp.einsum("blf,fh->bhl", products, own, precision="highest")[:, :, None]
        plane = jax.ShapeDtypeStruct(query.shape, query.dtype)
        rows = flash.rows(batch)
        blocks = (
            "whole_plane", "plane", "plane", "whole_plane", "whole_row", "whole_row", "whole_of_heads", "whole_of_heads"
        )  # fmt: skip
        arrays = query, key, value, of_context, first, last, log_sums, products
        return flash.call(
            _backward_kernel,
            "backward",
            list(zip(blocks, arrays, strict=True)),
            [("whole_plane", plane), ("plane", plane), ("plane", plane)],
            in_order=True,
            scratch_shapes=[pltpu.VMEM((rows, LANES, length), jnp.float32)],
        )

    axes = (_PLANE, _PLANE, _PLANE, _PLANE, _PLANE, _ROW, _ROW, _OF_HEADS)
    run_on_mesh = on_mesh(run, axes, (_PLANE, _PLANE, _PLANE))
    return *run_on_mesh(query, key, value, context, of_context, *bounds, log_sums), None


_attend.defvjp(_attend_forward, _attend_backward)


def _forward_kernel(
    flash: Flash, rows, query_ref, key_ref, value_ref, first_ref, last_ref, context_ref, log_sums_ref
):  # fmt: skip
    size, dtype = flash.size, query_ref.dtype
    for row in range(rows):
        for start in range(0, flash.block, flash.chunk):
            at = pl.ds(start, flash.chunk)
            bounds = Bounds(first_ref[row, :, at], last_ref[row, :, at])
            queries = transposed(query_ref[row, at, :]) * flash.scale
            queries = [only_head(head, size, queries).astype(dtype) for head in range(flash.heads)]

            def meet(first_key, carry, row=row, bounds=bounds, queries=queries):
                piece = pl.ds(first_key, flash.piece)
                keys, values = key_ref[row, piece, :], transposed(value_ref[row, piece, :])
                visible = _visible(first_key, flash.piece, bounds)
                found = []
                for head, (most, sums, context) in enumerate(carry):
                    scores = jnp.where(visible, dot(keys, queries[head]), _MASKED)
                    now = jnp.maximum(most, scores.max(0, keepdims=True))
                    probs, share = jnp.exp2(scores - now), jnp.exp2(most - now)
                    added = dot(values[head * size : (head + 1) * size].astype(dtype), probs.astype(dtype))
                    found.append((now, sums * share + probs.sum(0, keepdims=True), context * share + added))
                return tuple(found)

            def zeros(height):
                return jnp.zeros((height, flash.chunk), jnp.float32)

            # What was masked before anything was seen counts as nothing afterwards, as its share is zero.
            begin = (zeros(1) + 2 * _MASKED, zeros(1), zeros(size))
            done = flash.meet(pl.program_id(2) * flash.block + start, bounds, meet, (begin,) * flash.heads)
            for head, (most, sums, _) in enumerate(done):
                log_sums_ref[row, head, :, at] = most + jnp.log2(sums)
            context = jnp.concatenate([context / sums for _, sums, context in done])
            context_ref[row, at, :] = context.T.astype(dtype)


def _backward_kernel(
    flash: Flash, rows, query_ref, key_ref, value_ref, of_context_ref, first_ref, last_ref, log_sums_ref, products_ref,
    of_query_ref, of_key_ref, of_value_ref, of_queries_ref,
):  # fmt: skip
    size, dtype = flash.size, query_ref.dtype

    @pl.when(pl.program_id(2) == 0)
    def _():
        of_queries_ref[...] = jnp.zeros_like(of_queries_ref)

    for row in range(rows):
        for start in range(0, flash.block, flash.chunk):
            at, first_key = pl.ds(start, flash.chunk), pl.program_id(2) * flash.block + start
            keys, values = key_ref[row, at, :], value_ref[row, at, :]
            keys_t = transposed(keys)
            # Who sees whom is mutual.
            chunk = pl.ds(pl.multiple_of(first_key, LANES), flash.chunk)
            bounds = Bounds(first_ref[row, :, chunk], last_ref[row, :, chunk])

            def meet(first_query, carry, row=row, first_key=first_key, keys=keys, values=values, keys_t=keys_t):
                piece = pl.ds(first_query, flash.piece)
                queries, of_context = query_ref[row, piece, :], of_context_ref[row, piece, :]
                queries_t, of_context_t = transposed(queries) * flash.scale, transposed(of_context)
                visible = _visible(first_key, flash.chunk, Bounds(first_ref[row, :, piece], last_ref[row, :, piece]))
                found, of_queries = [], []
                for head, (of_keys, of_values) in enumerate(carry):
                    scores = dot(keys, only_head(head, size, queries_t).astype(dtype))
                    probs = jnp.exp2(jnp.where(visible, scores, _MASKED) - log_sums_ref[row, head, :, piece])
                    of_probs = dot(values, only_head(head, size, of_context_t).astype(dtype))
                    of_scores = (probs * (of_probs - products_ref[row, head, :, piece])).astype(dtype)
                    found.append((of_keys + dot(of_scores, queries), of_values + dot(probs.astype(dtype), of_context)))
                    of_queries.append(dot(keys_t[head * size : (head + 1) * size].astype(dtype), of_scores))
                of_queries_ref[row, :, piece] += jnp.concatenate(of_queries)
                return tuple(found)

            zeros = jnp.zeros((flash.chunk, LANES), jnp.float32)
            done = flash.meet(first_key, bounds, meet, ((zeros, zeros),) * flash.heads)
            of_keys, of_values = (own_lanes(parts, size) for parts in zip(*done, strict=True))
            of_key_ref[row, at, :] = (of_keys * (1 / math.sqrt(size))).astype(dtype)
            of_value_ref[row, at, :] = of_values.astype(dtype)

    @pl.when(pl.program_id(2) == flash.length // flash.block - 1)
    def _():
        for row in range(rows):
            of_query_ref[row] = (of_queries_ref[row] * (1 / math.sqrt(size))).T.astype(dtype)


def _visible(first_key, keys: int, bounds: Bounds):
    """`[keys, queries]` booleans, of the bounds of the queries `[1, queries]`."""
    places = first_key + jax.lax.broadcasted_iota(jnp.int32, (keys, bounds.first.shape[1]), 0)
    return (places >= bounds.first) & (places <= bounds.last)
