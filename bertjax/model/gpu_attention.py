"""Self-attention as two GPU kernels: scores, mask, softmax and dropout never leave the chip.

Scores exist a piece at a time (FlashAttention; Dao et al. 2022). What a token sees is an interval of its row: its
segment, and of it what is within the window, or what is not later. Pieces outside of it are not computed. The backward
kernel computes probabilities and dropout masks again (a hash of row, head, query and key). It goes through the pieces
twice, once for keys and once for queries: no two programs add to the same place, so gradients are the same each time.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from bertjax.config import Compute
from bertjax.model.gpu_kernels import gpu_call, has_gpu_kernels, kept_at
from bertjax.model.kernels import index_along, key_words, on_mesh
from bertjax.model.segments import bounds_of

SIZES = (16, 32, 64, 128)  # the sizes that a head may have
LONGEST = 8192  # tokens of a row
_LEAST = -1e30  # the maximum of no scores
_PROJECTIONS = ("batch", "length", None, "heads", None)
_PLANE = ("batch", "length", "heads", None)
_HEADS = ("batch", "length", "heads")
_OF_HEADS = ("batch", "heads", "length")
_ROW = ("batch", "length")
_WORDS = ("batch", None)


class Tiles(NamedTuple):
    """How a kernel divides its work."""

    block: int  # queries, or keys, of a program
    piece: int  # keys, or queries, that they meet at a time
    warps: int
    stages: int  # pieces that are loaded ahead


def tiles_of(size: int) -> tuple[Tiles, Tiles]:
    """Returns the tiles of the forward and of the backward kernel, for heads of a `size`: the fastest that were tried
    on an H100 with heads of 64 and rows of 512."""
    if size > 64:  # chosen by the compiler's counts: more would not stay in the registers of an A100 or an L4
        return Tiles(block=128, piece=32, warps=8, stages=2), Tiles(block=64, piece=32, warps=8, stages=2)
    return Tiles(block=64, piece=64, warps=4, stages=3), Tiles(block=64, piece=64, warps=4, stages=2)


def can_attend_on_gpu(compute: Compute, length: int, size: int) -> bool:
    """Returns whether the kernels can run on `length` tokens and heads of a `size`."""
    return has_gpu_kernels(compute) and size in SIZES and length <= LONGEST


def gpu_attention(
    query_key_value, segments, dropout_keys=None, rate: float = 0.0, *, chip: str, causal: bool = False,
    window: int | None = None, tiles: tuple[Tiles, Tiles] | None = None,
):  # fmt: skip
    """softmax(Q K^T / sqrt(size)) V within segments, with dropout on the softmax.

    Args:
      query_key_value: `[batch, length, 3, heads, size]`; size is one of `SIZES`.
      segments: `[batch, length]` int32; those of a segment lie side by side.
      dropout_keys: `[batch]`; None: no dropout.
      rate: the dropout rate.
      chip: `device_kind`.
      causal: tokens attend to themselves and to earlier ones only.
      window: tokens attend only to those at most so many places away.
      tiles: how the forward and the backward kernel divide their work, if not as `tiles_of` says.

    Returns:
      `[batch, length, heads * size]`.
    """
    batch, length, *_, size = query_key_value.shape
    rate, sees = 0.0 if dropout_keys is None else rate, "causal" if causal else window
    attention = GpuAttention(length, size, rate, chip, *(tiles or tiles_of(size)), sees)
    words = key_words(dropout_keys, batch)
    if attention.padded == length:
        return _attend(query_key_value, intervals(segments, causal, window), words, attention)
    missing = [(0, 0), (0, attention.padded - length)]
    segments = jnp.pad(segments, missing, constant_values=-1)  # padding, in a segment of its own
    projected = jnp.pad(query_key_value, [*missing, (0, 0), (0, 0), (0, 0)])
    return _attend(projected, intervals(segments, causal, window), words, attention)[:, :length]


class Intervals(NamedTuple):
    """The first and the last token that each token sees, and those that see it, `[batch, length]` int32."""

    first: jax.Array
    last: jax.Array
    first_seen_by: jax.Array
    last_seen_by: jax.Array


def intervals(segments, causal: bool, window: int | None) -> Intervals:
    """Returns what tokens see; for `segments`, `causal` and `window` see `gpu_attention`."""
    first, last = bounds_of(segments, window)
    if not causal:
        return Intervals(first, last, first, last)
    own = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    return Intervals(first, own, own, last)


class GpuAttention(NamedTuple):
    """What both kernels need to know."""

    length: int  # tokens of a row, without padding to whole blocks
    size: int  # a head's size
    rate: float
    chip: str
    forward: Tiles
    backward: Tiles
    sees: int | str | None = None  # a window, or "causal": for the kernels' names, as `intervals` say it to them

    def name(self, direction: str) -> str:
        """Returns a kernel's name: gpu_attention_forward, gpu_attention_backward_64 (of a window), ..."""
        return "_".join(["gpu_attention", direction, *([str(self.sees)] if self.sees is not None else [])])

    @property
    def padded(self) -> int:
        """The tokens of a row that the kernels run on: whole blocks, or a power of two that is less."""
        whole = math.lcm(*(size for tiles in (self.forward, self.backward) for size in (tiles.block, tiles.piece)))
        if self.length < whole:
            return max(16, pl.next_power_of_2(self.length))  # one block
        return -(-self.length // whole) * whole

    @property
    def scale(self) -> float:
        """The factor of the scores, for powers of two instead of e."""
        return math.log2(math.e) / math.sqrt(self.size)

    def call(self, kernel, name: str, tiles: Tiles, inputs, outputs):
        """Runs a kernel for each block of tokens of each head of each row.

        `inputs`, `outputs`: pairs of a block's form and an array, or its shape and type.
        """
        batch, length, _, heads, size = inputs[0][1].shape
        block = min(tiles.block, length)
        form = {
            "projections": pl.BlockSpec((None, block, 3, None, size), lambda i, j, k: (k, i, 0, j, 0)),
            "plane": pl.BlockSpec((None, block, None, size), lambda i, j, k: (k, i, j, 0)),
            "of_heads": pl.BlockSpec((None, None, block), lambda i, j, k: (k, j, i)),
            "row": pl.BlockSpec((None, block), lambda i, j, k: (k, i)),
            "words": pl.BlockSpec((None, 3), lambda i, j, k: (k, 0)),
            "whole_projections": pl.BlockSpec((None, length, 3, None, size), lambda i, j, k: (k, 0, 0, j, 0)),
            "whole_plane": pl.BlockSpec((None, length, None, size), lambda i, j, k: (k, 0, j, 0)),
            "whole_heads": pl.BlockSpec((None, length, None), lambda i, j, k: (k, 0, j)),
            "whole_of_heads": pl.BlockSpec((None, None, length), lambda i, j, k: (k, j, 0)),
        }
        call = gpu_call(
            functools.partial(kernel, self),
            grid=(length // block, heads, batch),
            in_specs=[form[each] for each, _ in inputs],
            out_specs=[form[each] for each, _ in outputs],
            out_shape=[shape for _, shape in outputs],
            chip=self.chip,
            warps=tiles.warps,
            stages=tiles.stages,
            name=name,
        )
        return call(*(array for _, array in inputs))


def work_of(name: str, shape: tuple[int, ...], rate: float) -> tuple[int, int]:
    """Returns the FLOPs of a kernel's matrix products, and its operations outside of them, on rows of one segment.

    Args:
      name: as `GpuAttention.name` says.
      shape: of the projections, `[batch, length, 3, heads, size]`.
      rate: the dropout rate.
    """
    batch, length, _, heads, size = shape
    direction, _, sees = name.removeprefix("gpu_attention_").partition("_")
    pairs = length * (length + 1) // 2 if sees == "causal" else length * min(length, 2 * int(sees or length) + 1)
    # The backward kernel computes scores and the gradients of probabilities twice: for its keys, and for its queries.
    # Other operations on a score: bounds (4), scale, maximum or difference, sum or product, and a power of two.
    products, elements, hashes = {"forward": (2, 8, 1), "backward": (7, 16, 2)}[direction]
    pairs *= batch * heads
    return 2 * products * size * pairs, (elements + hashes * (_HASH if rate else 0)) * pairs


_HASH = 14  # operations of `kept_at` on a score, with its index


def _with_heads(words, heads: int):
    """Adds the number of the device's first head to the words of each row's key."""
    first = jnp.full((len(words), 1), index_along("heads") * heads, jnp.uint32)
    return jnp.concatenate([words, first], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(projected, seen: Intervals, words, attention: GpuAttention):
    return _attend_forward(projected, seen, words, attention)[0]


def _attend_forward(projected, seen, words, attention):
    def run(projected, words, first, last):
        batch, length, _, heads, size = projected.shape
        context = jax.ShapeDtypeStruct((batch, length, heads, size), projected.dtype)
        log_sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
        inputs = [("whole_projections", projected), ("words", _with_heads(words, heads)), ("row", first), ("row", last)]
        outputs = [("plane", context), ("of_heads", log_sums)]
        return attention.call(_forward_kernel, attention.name("forward"), attention.forward, inputs, outputs)

    run = on_mesh(run, (_PROJECTIONS, _WORDS, _ROW, _ROW), (_PLANE, _OF_HEADS))
    context, log_sums = run(projected, words, seen.first, seen.last)
    context = context.reshape(*context.shape[:2], -1)
    return context, (projected, seen, words, context, log_sums)


def _attend_backward(attention, saved, of_context):
    def run(projected, words, of_context, log_sums, row_sums, *seen):
        inputs = [("whole_projections", projected), ("words", _with_heads(words, projected.shape[3]))]
        inputs += [("whole_plane", of_context), ("whole_of_heads", log_sums), ("whole_heads", row_sums)]
        inputs += [("row", each) for each in seen]
        outputs = [("projections", jax.ShapeDtypeStruct(projected.shape, projected.dtype))]
        return attention.call(_backward_kernel, attention.name("backward"), attention.backward, inputs, outputs)

    projected, seen, words, context, log_sums = saved
    context, of_context = (x.reshape(*x.shape[:2], *projected.shape[3:]) for x in (context, of_context))
    # Softmax's gradient subtracts the sum over keys of probs * of_probs, which is that of context * of_context.
    row_sums = (context.astype(jnp.float32) * of_context.astype(jnp.float32)).sum(-1)
    axes = (_PROJECTIONS, _WORDS, _PLANE, _OF_HEADS, _HEADS, *(_ROW,) * len(seen))
    (of_projected,) = on_mesh(run, axes, (_PROJECTIONS,))(projected, words, of_context, log_sums, row_sums, *seen)
    return of_projected, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _dot(a, b, *, transpose_b: bool = False):
    """A B, or A B^T, summed in float32; if the factors are float32, they are not rounded."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = (((1,), (1 if transpose_b else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=jnp.float32)


def _meet(first, last, piece: int, step, carry):
    """Runs `carry = step(first token of the piece, carry)` over the pieces that a block meets.

    `first`, `last`: the bounds of the block's tokens.
    """
    begin, end = jax.lax.div(jnp.min(first), piece), jax.lax.div(jnp.max(last), piece) + 1
    return jax.lax.fori_loop(begin, end, lambda i, carry: step(i * piece, carry), carry)


def _where_visible(first, last, start, x, otherwise: float):
    """`[block, piece]` x where the piece, which begins at `start`, is within the bounds of each token of the block."""
    places = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where((places >= first[:, None]) & (places <= last[:, None]), x, otherwise)


def _make_dropout(attention: GpuAttention, words_ref):
    """Returns a function that drops of the program's head what `dropout` does: see its arguments."""
    length = jnp.uint32(attention.length)
    head = jnp.uint32(pl.program_id(1)) + words_ref[2]
    words, start_of_head = (words_ref[0], words_ref[1]), head * length * length

    def drop(*pieces, first_query, first_key, queries: int):
        """Zeroes elements of pieces, which begin at a query and at a key; `queries`: their axis."""
        shape = pieces[0].shape
        query, key = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in (queries, 1 - queries))
        start = start_of_head + jnp.uint32(first_query) * length + jnp.uint32(first_key)
        mask = kept_at(words, start + query * length + key, attention.rate)
        return [jnp.where(mask, piece, 0.0) for piece in pieces]

    return drop if attention.rate else lambda *pieces, **_: pieces


def _forward_kernel(attention: GpuAttention, projected_ref, words_ref, first_ref, last_ref, context_ref, log_sums_ref):
    block, size, dtype = len(first_ref), attention.size, projected_ref.dtype
    piece, scale = min(attention.forward.piece, len(projected_ref)), attention.scale
    first_query, drop = pl.program_id(0) * block, _make_dropout(attention, words_ref)
    queries = projected_ref[pl.ds(first_query, block), 0, :]
    first, last = first_ref[...], last_ref[...]

    def meet(first_key, carry):
        most, sums, context = carry
        at = pl.ds(first_key, piece)
        scores = _dot(queries, projected_ref[at, 1, :], transpose_b=True)
        scores = _where_visible(first, last, first_key, scores, -jnp.inf)
        now = jnp.maximum(most, scores.max(1) * scale)
        probs, share = jnp.exp2(scores * scale - now[:, None]), jnp.exp2(most - now)
        (dropped,) = drop(probs, first_query=first_query, first_key=first_key, queries=0)
        added = _dot(dropped.astype(dtype), projected_ref[at, 2, :])
        return now, sums * share + probs.sum(1), context * share[:, None] + added

    most, zeros = jnp.full((block,), _LEAST, jnp.float32), jnp.zeros((block,), jnp.float32)
    most, sums, context = _meet(first, last, piece, meet, (most, zeros, jnp.zeros((block, size), jnp.float32)))
    log_sums_ref[...] = most + jnp.log2(sums)
    context_ref[...] = (context / (sums * (1 - attention.rate))[:, None]).astype(dtype)


def _backward_kernel(
    attention: GpuAttention, projected_ref, words_ref, of_context_ref, log_sums_ref, row_sums_ref, first_ref, last_ref,
    first_seen_by_ref, last_seen_by_ref, of_projected_ref,
):  # fmt: skip
    block, size, dtype = len(first_ref), attention.size, projected_ref.dtype
    piece, scale, keep = min(attention.backward.piece, len(projected_ref)), attention.scale, 1 - attention.rate
    start, drop = pl.program_id(0) * block, _make_dropout(attention, words_ref)
    own, zeros = pl.ds(start, block), jnp.zeros((block, size), jnp.float32)

    keys, values = projected_ref[own, 1, :], projected_ref[own, 2, :]
    first, last = first_seen_by_ref[...], last_seen_by_ref[...]

    def meet_queries(first_query, carry):
        of_keys, of_values = carry
        at = pl.ds(first_query, piece)
        queries, of_context = projected_ref[at, 0, :], of_context_ref[at, :]
        probs = jnp.exp2(_dot(keys, queries, transpose_b=True) * scale - log_sums_ref[at][None])
        probs = _where_visible(first, last, first_query, probs, 0.0)
        of_probs = _dot(values, of_context, transpose_b=True) * (1 / keep)
        dropped, of_probs = drop(probs, of_probs, first_query=first_query, first_key=start, queries=1)
        of_values += _dot(dropped.astype(dtype), of_context)
        of_scores = (probs * (of_probs - row_sums_ref[at][None])).astype(dtype)
        return of_keys + _dot(of_scores, queries), of_values

    of_keys, of_values = _meet(first, last, piece, meet_queries, (zeros, zeros))
    of_projected_ref[:, 1, :] = (of_keys * (1 / math.sqrt(size))).astype(dtype)
    of_projected_ref[:, 2, :] = (of_values * (1 / keep)).astype(dtype)

    queries, of_context = projected_ref[own, 0, :], of_context_ref[own, :]
    log_sums, row_sums, first_seen, last_seen = log_sums_ref[own], row_sums_ref[own], first_ref[...], last_ref[...]

    def meet_keys(first_key, of_queries):
        at = pl.ds(first_key, piece)
        keys = projected_ref[at, 1, :]
        probs = jnp.exp2(_dot(queries, keys, transpose_b=True) * scale - log_sums[:, None])
        probs = _where_visible(first_seen, last_seen, first_key, probs, 0.0)
        of_probs = _dot(of_context, projected_ref[at, 2, :], transpose_b=True) * (1 / keep)
        (of_probs,) = drop(of_probs, first_query=start, first_key=first_key, queries=0)
        return of_queries + _dot((probs * (of_probs - row_sums[:, None])).astype(dtype), keys)

    of_queries = _meet(first_seen, last_seen, piece, meet_keys, zeros)
    of_projected_ref[:, 0, :] = (of_queries * (1 / math.sqrt(size))).astype(dtype)
