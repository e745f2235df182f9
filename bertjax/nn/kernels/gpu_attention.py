"""Self-attention as GPU kernels: scores, mask, softmax and dropout never leave the chip.

Scores are computed in pieces (FlashAttention; Dao et al. 2022). A token attends to an interval of its row: the part of
its segment that is within the window, or that is not later. Pieces outside the interval are not computed. The backward
pass recomputes probabilities and dropout masks (a hash of row, head, query and key) in two kernels, for keys and
values, and for queries: no two programs add to the same element, so that gradients are reproducible.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from bertjax.config.model_config import Compute
from bertjax.nn.kernels.pallas import Ref, call_on_blocks, key_words, on_mesh, with_first_head
from bertjax.nn.kernels.triton import HOPPER, gpu_call, has_gpu_kernels, power_of_two, zero_dropped
from bertjax.nn.ops.dropout import folded, hash_folded, hash_index
from bertjax.nn.ops.segments import bounds_of

SIZES = (16, 32, 64, 128)  # the sizes that a head may have
LONGEST = 8192  # tokens of a row
_LEAST = -1e30  # the maximum before the first score
_PROJECTIONS = ("batch", "length", None, "heads", None)
_PLANE = ("batch", "length", "heads", None)
_HEADS = ("batch", "length", "heads")
_OF_HEADS = ("batch", "heads", "length")
_ROW = ("batch", "length")
_WORDS = ("batch", None)


class Tiles(NamedTuple):
    """The division of the work of a kernel."""

    block: int  # queries, or keys, of a program
    piece: int  # keys, or queries, that a block meets at a time
    warps: int
    stages: int  # pieces that are loaded ahead


class AllTiles(NamedTuple):
    """The tiles of the forward kernel, and of the kernels of the gradients of keys and values, and of queries."""

    forward: Tiles
    keys: Tiles
    queries: Tiles


def tiles_of(size: int, chip: str) -> AllTiles:
    """Returns the tiles for heads of a `size`."""
    if size > 64:  # larger tiles would not fit in the registers of an A100 or an L4, according to the compiler
        return AllTiles(Tiles(128, 32, warps=8, stages=2), *[Tiles(64, 32, warps=8, stages=2)] * 2)
    fastest = Tiles(64, 64, warps=4, stages=3)  # of 14 tiles for each kernel on an H200, with rows of 512
    if chip.startswith(HOPPER):
        return AllTiles(fastest, fastest, fastest)
    return AllTiles(fastest, fastest._replace(piece=32), fastest)  # larger pieces would not fit in the registers


def can_attend_on_gpu(compute: Compute, length: int, size: int) -> bool:
    """Returns whether the kernels can run on `length` tokens and heads of a `size`."""
    return has_gpu_kernels(compute) and size in SIZES and length <= LONGEST


def gpu_attention(
    query_key_value: Array,
    segments: Array,
    dropout_keys: Array | None = None,
    rate: float = 0.0,
    *,
    chip: str,
    causal: bool = False,
    window: int | None = None,
    tiles: AllTiles | None = None,
) -> Array:
    """softmax(Q K^T / sqrt(size)) V within segments, with dropout on the softmax.

    Args:
      query_key_value: `[batch, length, 3, heads, size]`; size is one of `SIZES`.
      segments: `[batch, length]` int32; the tokens of a segment are consecutive.
      dropout_keys: `[batch]`; None: no dropout.
      rate: the dropout rate.
      chip: `device_kind`.
      causal: tokens attend to earlier tokens and to themselves.
      window: tokens attend to tokens at most this number of places away; None: to any distance.
      tiles: the division of the work; None: `tiles_of`.

    Returns:
      `[batch, length, heads * size]`.
    """
    batch, length, *_, size = query_key_value.shape
    rate, reach = 0.0 if dropout_keys is None else rate, "causal" if causal else window
    attention = GpuAttention(length, size, rate, chip, tiles or tiles_of(size, chip), reach)
    words = key_words(dropout_keys, batch)
    if attention.padded == length:
        return _attend(query_key_value, intervals(segments, causal, window), words, attention)
    missing = [(0, 0), (0, attention.padded - length)]
    segments = jnp.pad(segments, missing, constant_values=-1)  # padding has another segment
    projected = jnp.pad(query_key_value, [*missing, (0, 0), (0, 0), (0, 0)])
    return _attend(projected, intervals(segments, causal, window), words, attention)[:, :length]


class Intervals(NamedTuple):
    """The first and the last token that a token attends to, and that attend to a token, `[batch, length]` int32."""

    first: Array
    last: Array
    first_seen_by: Array
    last_seen_by: Array


def intervals(segments: Array, causal: bool, window: int | None) -> Intervals:
    """Returns the intervals of tokens; for `segments`, `causal` and `window` see `gpu_attention`."""
    first, last = bounds_of(segments, window)
    if not causal:
        return Intervals(first, last, first, last)
    places = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32), segments.shape)
    return Intervals(first, places, places, last)


class GpuAttention(NamedTuple):
    """The settings of all kernels."""

    length: int  # tokens of a row, without padding to whole blocks
    size: int  # of a head
    rate: float
    chip: str
    tiles: AllTiles
    reach: int | str | None = None  # a window, or "causal": a part of the names of the kernels

    def name(self, part: str) -> str:
        """Returns the name of a kernel, such as gpu_attention_keys_64 for a window; `part` is a field of `AllTiles`."""
        return f"gpu_attention_{part}" if self.reach is None else f"gpu_attention_{part}_{self.reach}"

    @property
    def padded(self) -> int:
        """The tokens of a row with padding: whole blocks, or a smaller power of two."""
        whole = math.lcm(*(size for tiles in self.tiles for size in (tiles.block, tiles.piece)))
        if self.length < whole:
            return max(16, int(pl.next_power_of_2(self.length)))  # all blocks and pieces divide this number
        return -(-self.length // whole) * whole

    @property
    def scale(self) -> float:
        """The factor of the scores, for powers of two instead of e."""
        return math.log2(math.e) / math.sqrt(self.size)

    def call(
        self, kernel: Callable[..., None], part: str, inputs: list[Any], outputs: list[Any], **options: Any
    ) -> Any:
        """Runs a kernel for each block of tokens of each head of each row, see `call_on_blocks`."""
        batch, length, _, heads, size = inputs[0][1].shape
        tiles: Tiles = getattr(self.tiles, part)
        block = min(tiles.block, length)
        blocks = {
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
        options |= dict(chip=self.chip, warps=tiles.warps, stages=tiles.stages, name=self.name(part))
        body, grid = functools.partial(kernel, self), (length // block, heads, batch)
        return call_on_blocks(gpu_call, body, blocks, inputs, outputs, grid=grid, **options)


class KernelWork(NamedTuple):
    """The work of a kernel, without the reads of its operands."""

    flops: int  # of matrix products
    operations: int  # all other operations
    written: float  # the share of the result that the kernel writes; another kernel writes the rest


def work_of(name: str, shape: tuple[int, ...], rate: float) -> KernelWork:
    """Returns the work of a kernel on rows of one segment.

    Args:
      name: the name of the kernel, from `GpuAttention.name`.
      shape: the shape of the projections, `[batch, length, 3, heads, size]`.
      rate: the dropout rate.
    """
    batch, length, _, heads, size = shape
    part, _, reach = name.removeprefix("gpu_attention_").partition("_")
    pairs = length * (length + 1) // 2 if reach == "causal" else length * min(length, 2 * int(reach or length) + 1)
    pairs *= batch * heads
    # Scores and the gradients of probabilities are computed for keys, and again for queries.
    products, written = {"forward": (2, 1.0), "keys": (4, 2 / 3), "queries": (3, 1 / 3)}[part]
    # Other operations on a score: scale and shift, a power of two, maximum and sum, or difference and product; with
    # dropout five operations of the hash, a comparison and a selection.
    return KernelWork(2 * products * size * pairs, (4 + (7 if rate else 0)) * pairs, written)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend(projected: Array, seen: Intervals, words: Array, attention: GpuAttention) -> Array:
    return _attend_forward(projected, seen, words, attention)[0]


def _attend_forward(projected: Array, seen: Intervals, words: Array, attention: GpuAttention) -> tuple[Array, Any]:
    def run(projected: Array, words: Array, first: Array, last: Array) -> Any:
        batch, length, _, heads, size = projected.shape
        context = jax.ShapeDtypeStruct((batch, length, heads, size), projected.dtype)
        log_sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
        inputs = [("whole_projections", projected), ("words", with_first_head(words, heads))]
        inputs += [("row", first), ("row", last)]
        outputs = [("plane", context), ("of_heads", log_sums)]
        return attention.call(_forward_kernel, "forward", inputs, outputs)

    run = on_mesh(run, (_PROJECTIONS, _WORDS, _ROW, _ROW), (_PLANE, _OF_HEADS))
    context, log_sums = run(projected, words, seen.first, seen.last)
    context = context.reshape(*context.shape[:2], -1)
    return context, (projected, seen, words, context, log_sums)


def _attend_backward(attention: GpuAttention, saved: Any, of_context: Array) -> tuple[Array, None, None]:
    def run(projected: Array, words: Array, of_context: Array, log_sums: Array, row_sums: Any, *seen: Array) -> Any:
        inputs = [("whole_projections", projected), ("words", with_first_head(words, projected.shape[3]))]
        inputs += [("whole_plane", of_context), ("whole_of_heads", log_sums), ("whole_heads", row_sums)]
        inputs += [("row", bound) for bound in seen]
        outputs = [("projections", jax.ShapeDtypeStruct(projected.shape, projected.dtype))]
        (of_projected,) = attention.call(_keys_kernel, "keys", inputs, outputs)
        inputs.append(("projections", of_projected))
        return attention.call(_queries_kernel, "queries", inputs, outputs, input_output_aliases={len(inputs) - 1: 0})

    projected, seen, words, context, log_sums = saved
    context, of_context = (x.reshape(*x.shape[:2], *projected.shape[3:]) for x in (context, of_context))
    # The gradient of softmax subtracts the sum over keys of probs * of_probs, which equals the sum of context *
    # of_context. Here this sum and of_probs are multiplied by the share that dropout keeps. The kernels scale their
    # results up at the end.
    row_sums = (1 - attention.rate) * (context.astype(jnp.float32) * of_context.astype(jnp.float32)).sum(-1)
    axes = (_PROJECTIONS, _WORDS, _PLANE, _OF_HEADS, _HEADS, *(_ROW,) * len(seen))
    (of_projected,) = on_mesh(run, axes, (_PROJECTIONS,))(projected, words, of_context, log_sums, row_sums, *seen)
    return of_projected, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _dot(a: Array, b: Array, *, transpose_b: bool = False) -> Array:
    """Returns A B or A B^T, summed in float32. Factors of float32 are not rounded."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contracted = (((1,), (1 if transpose_b else 0,)), ((), ()))
    return jax.lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=jnp.float32)


def _meet(first: Array, last: Array, piece: int, step: Callable[..., Any], carry: Any) -> Any:
    """Runs `carry = step(first token of the piece, carry)` over the pieces within the bounds of the block's tokens."""
    begin, end = jax.lax.div(jnp.min(first), piece), jax.lax.div(jnp.max(last), piece) + 1
    return jax.lax.fori_loop(begin, end, lambda i, carry: step(i * piece, carry), carry)


def _where_visible(first: Array, last: Array, start: Array, x: Array, otherwise: float) -> Array:
    """Returns x `[block, piece]` within the bounds of the block's tokens, and `otherwise` elsewhere.

    The piece begins at the token `start`.
    """

    def bounded(x: Array) -> Array:
        places = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return jnp.where((places >= first[:, None]) & (places <= last[:, None]), x, otherwise)

    is_within = (jnp.max(first) <= start) & (start + x.shape[1] - 1 <= jnp.min(last))
    return jax.lax.cond(is_within, lambda x: x, bounded, x)


def _make_dropout(attention: GpuAttention, words_ref: Ref) -> Callable[..., Any]:
    """Returns a function that drops the elements of the program's head that `dropout` drops."""
    length = jnp.uint32(attention.length)
    head = jnp.uint32(pl.program_id(1)) + words_ref[2]
    words, start_of_head = (words_ref[0], words_ref[1]), head * length * length

    def drop(*pieces: Array, first_query: Any, first_key: Any, queries: int) -> list[Array]:
        """Zeroes elements of pieces that begin at a query and at a key. `queries` is the axis of the queries."""
        shape = pieces[0].shape
        query, key = (_along(axis, shape) for axis in (queries, 1 - queries))
        query = start_of_head + (jnp.uint32(first_query) + query) * length + jnp.uint32(first_key)
        if attention.length % shape[1 - queries] == 0:  # query and key share no bit: the first step is computed apart
            hashes = hash_folded(folded(query ^ words[0]) ^ folded(key), words[1])
        else:
            hashes = hash_index(query + key, *words)
        return [zero_dropped(piece, hashes, attention.rate, attention.chip) for piece in pieces]

    return drop if attention.rate else lambda *pieces, **_: pieces


def _along(axis: int, shape: tuple[int, ...]) -> Array:
    """Returns 0, 1, 2, ... along an axis of a 2-D `shape`; the size of the other axis is 1."""
    return jax.lax.broadcasted_iota(jnp.uint32, tuple(n if i == axis else 1 for i, n in enumerate(shape)), axis)


def _forward_kernel(attention: GpuAttention, *refs: Ref) -> None:
    projected_ref, words_ref, first_ref, last_ref, context_ref, log_sums_ref = refs
    block, size, dtype = len(first_ref), attention.size, projected_ref.dtype
    piece, scale = min(attention.tiles.forward.piece, len(projected_ref)), attention.scale
    first_query, drop = pl.program_id(0) * block, _make_dropout(attention, words_ref)
    queries = projected_ref[pl.ds(first_query, block), 0, :]
    first, last = first_ref[...], last_ref[...]

    def meet(first_key: Array, carry: Any) -> Any:
        largest, sums, context = carry
        at = pl.ds(first_key, piece)
        scores = _dot(queries, projected_ref[at, 1, :], transpose_b=True)
        scores = _where_visible(first, last, first_key, scores, -jnp.inf)
        maximum = jnp.maximum(largest, scores.max(1) * scale)
        probs, share = power_of_two(scores, scale, maximum[:, None], attention.chip), jnp.exp2(largest - maximum)
        (dropped,) = drop(probs, first_query=first_query, first_key=first_key, queries=0)
        added = _dot(dropped.astype(dtype), projected_ref[at, 2, :])
        return maximum, sums * share + probs.sum(1), context * share[:, None] + added

    largest, zeros = jnp.full((block,), _LEAST, jnp.float32), jnp.zeros((block,), jnp.float32)
    largest, sums, context = _meet(first, last, piece, meet, (largest, zeros, jnp.zeros((block, size), jnp.float32)))
    log_sums_ref[...] = largest + jnp.log2(sums)
    context_ref[...] = (context / (sums * (1 - attention.rate))[:, None]).astype(dtype)


def _keys_kernel(attention: GpuAttention, *refs: Ref) -> None:
    """Writes the gradients of a block of keys and values."""
    projected_ref, words_ref, of_context_ref, log_sums_ref, row_sums_ref, _, _, *outputs = refs
    first_seen_by_ref, last_seen_by_ref, of_projected_ref = outputs
    block, size, dtype = len(first_seen_by_ref), attention.size, projected_ref.dtype
    piece, keep = min(attention.tiles.keys.piece, len(projected_ref)), 1 - attention.rate
    first_key, drop = pl.program_id(0) * block, _make_dropout(attention, words_ref)
    tokens, zeros = pl.ds(first_key, block), jnp.zeros((block, size), jnp.float32)
    keys, values = projected_ref[tokens, 1, :], projected_ref[tokens, 2, :]
    first, last = first_seen_by_ref[...], last_seen_by_ref[...]

    def meet(first_query: Array, carry: Any) -> Any:
        of_keys, of_values = carry
        at = pl.ds(first_query, piece)
        queries, of_context = projected_ref[at, 0, :], of_context_ref[at, :]
        scores = _dot(keys, queries, transpose_b=True)
        probs = power_of_two(scores, attention.scale, log_sums_ref[at][None], attention.chip)
        probs = _where_visible(first, last, first_query, probs, 0.0)
        of_probs = _dot(values, of_context, transpose_b=True)
        dropped, of_probs = drop(probs, of_probs, first_query=first_query, first_key=first_key, queries=1)
        of_values += _dot(dropped.astype(dtype), of_context)
        of_scores = (probs * (of_probs - row_sums_ref[at][None])).astype(dtype)
        return of_keys + _dot(of_scores, queries), of_values

    of_keys, of_values = _meet(first, last, piece, meet, (zeros, zeros))
    of_projected_ref[:, 1, :] = (of_keys * (1 / (keep * math.sqrt(size)))).astype(dtype)
    of_projected_ref[:, 2, :] = (of_values * (1 / keep)).astype(dtype)


def _queries_kernel(attention: GpuAttention, *refs: Ref) -> None:
    """Writes the gradient of a block of queries into the array with the gradients of keys and values."""
    projected_ref, words_ref, of_context_ref, log_sums_ref, row_sums_ref, first_ref, last_ref, *_, of_projected_ref = (
        refs
    )
    block, size, dtype = len(first_ref), attention.size, projected_ref.dtype
    piece, keep = min(attention.tiles.queries.piece, len(projected_ref)), 1 - attention.rate
    first_query, drop = pl.program_id(0) * block, _make_dropout(attention, words_ref)
    tokens = pl.ds(first_query, block)
    queries, of_context = projected_ref[tokens, 0, :], of_context_ref[tokens, :]
    log_sums, row_sums, first, last = log_sums_ref[tokens], row_sums_ref[tokens], first_ref[...], last_ref[...]

    def meet(first_key: Array, of_queries: Array) -> Any:
        at = pl.ds(first_key, piece)
        keys = projected_ref[at, 1, :]
        scores = _dot(queries, keys, transpose_b=True)
        probs = power_of_two(scores, attention.scale, log_sums[:, None], attention.chip)
        probs = _where_visible(first, last, first_key, probs, 0.0)
        of_probs = _dot(of_context, projected_ref[at, 2, :], transpose_b=True)
        (of_probs,) = drop(of_probs, first_query=first_query, first_key=first_key, queries=0)
        return of_queries + _dot((probs * (of_probs - row_sums[:, None])).astype(dtype), keys)

    of_queries = _meet(first, last, piece, meet, jnp.zeros((block, size), jnp.float32))
    of_projected_ref[:, 0, :] = (of_queries * (1 / (keep * math.sqrt(size)))).astype(dtype)
