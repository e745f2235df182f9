"""Self-attention over long texts as two TPU kernels, within segments, and optionally within a window.

Scores are computed in pieces (FlashAttention; Dao et al. 2022) of the form `[keys, queries]`: softmax then reduces over
sublanes, and its statistics are rows. A piece outside the window or in other segments is not computed. A grid step
processes the heads that share 128 lanes.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bertjax.nn.kernels.pallas import (
    LANES,
    SUBLANES,
    Ref,
    call_on_blocks,
    dot,
    is_small,
    kernel_call,
    on_mesh,
    only_head,
    own_lanes,
    parts_along,
    transposed,
)
from bertjax.nn.ops.rotary import Rotation
from bertjax.nn.ops.segments import Bounds, bounds_of

LONGEST = 8192  # tokens; queries and the gradients of queries and context must fit on the chip
LONGEST_BLOCK = 512  # queries or keys of a grid step
ON_CHIP = 48 << 20  # bytes of memory on chip, of 64 MiB or 128
_MASKED = -1e30
_PLANE = ("batch", "length", "heads")  # [batch, length, heads * size]
_ROW = ("batch", None, "length")
_ANGLES = ("batch", None, "length")
_OF_HEADS = ("batch", "heads", None, "length")


def can_flash(length: int, width: int, size: int) -> bool:
    """Returns whether the kernels support `length` tokens and `width // size` heads of a `size`.

    Fewer than 128 tokens would be mostly padding. Halves of heads must fill sublanes.
    """
    width //= parts_along("heads")
    return LANES <= length <= LONGEST and width % LANES == 0 and LANES % size == size % (2 * SUBLANES) == 0


def length_in_blocks(length: int) -> int:
    """Returns the number of tokens after padding: whole lanes, and whole blocks in long rows."""
    whole = LANES if length <= LONGEST_BLOCK else LONGEST_BLOCK
    return -(-length // whole) * whole


def flash_attention(
    x: Array, kernel: Array, bias: Array | None, turn: Rotation, segments: Array, chip: str, window: int | None = None
) -> Array:
    """Projects to queries, keys and values, rotates, and returns softmax(Q K^T / sqrt(size)) V within segments.

    The backward pass projects again: on TPUs this is faster than to store and read three projections.

    Args:
      x: `[batch, length, hidden]`.
      kernel: `[hidden, 3, heads, size]` of the projections, supported by `can_flash`.
      bias: `[3, heads, size]` of the projections; None: no bias.
      turn: the rotation of queries and keys.
      segments: see `segments.bounds_of`.
      chip: `device_kind`.
      window: see `segments.bounds_of`.

    Returns:
      `[batch, length, heads * size]`.
    """
    length, size = x.shape[1], kernel.shape[-1]
    missing = [(0, 0), (0, length_in_blocks(length) - length)]
    segments = jnp.pad(segments, missing, constant_values=-1)  # padding has another segment
    bounds = bound_rows(segments, window)
    x, *angles = (jnp.pad(array, [*missing, (0, 0)]) for array in (x, *turn))
    kernel, bias = kernel.reshape(len(kernel), 3, -1), None if bias is None else bias.reshape(3, -1)
    flash = Flash(x.shape[1], size, window, chip)
    return _attend(x, kernel, bias, angle_rows(*angles), bounds, flash)[:, :length]


def bound_rows(segments: Array, window: int | None) -> Bounds:
    """Returns the bounds of `segments.bounds_of` in the form of the kernels, `[batch, 1, length]`."""
    return Bounds(*(bound[:, None] for bound in bounds_of(segments, window)))


def angle_rows(cosines: Array, sines: Array) -> Array:
    """Returns angles `[batch, length, size / 2]` in the form of the kernels, `[batch, size, length]`."""
    return jnp.swapaxes(jnp.concatenate([cosines, sines], axis=-1), 1, 2)


class Flash(NamedTuple):
    """The settings of both kernels."""

    length: int  # tokens of a row, `length_in_blocks`
    size: int  # of a head
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
        """Whether a piece contains all tokens that a chunk of 128 tokens meets."""
        return LANES + 2 * self.reach <= min(1024, self.length)

    @property
    def chunk(self) -> int:
        """Queries (forward) or keys (backward) at a time."""
        return LANES if self.is_local else self.block

    @property
    def piece(self) -> int:
        """The number of keys (forward) or queries (backward) that a chunk meets at a time."""
        return LANES + 2 * self.reach if self.is_local else self.block

    @property
    def pieces(self) -> int:
        """The largest number of pieces that a chunk meets: in a row of one segment."""
        return 1 if self.is_local else self.length // self.piece

    @property
    def scale(self) -> float:
        """The factor of the scores, for powers of two instead of e."""
        return math.log2(math.e) / math.sqrt(self.size)

    def rows(self, batch: int) -> int:
        """Returns the rows of the batch in a grid step."""
        return math.gcd(batch, max(1, LONGEST_BLOCK // self.length))

    def name(self, kernel: str) -> str:
        """Returns the name of a kernel, with the window."""
        return f"flash_{kernel}" if self.window is None else f"flash_{kernel}_{self.window}"

    @staticmethod
    def window_of(name: str) -> int | None:
        """Returns the window of a kernel by its name."""
        window = name.rpartition("_")[2]
        return int(window) if window.isdecimal() else None

    def meet(self, first_of_chunk: Array, bounds: Bounds, step: Callable[..., Any], carry: Any) -> Any:
        """Runs `carry = step(first token of the piece, carry)` over the pieces that a chunk meets.

        Args:
          first_of_chunk: the first token of the chunk.
          bounds: the bounds of the tokens of the chunk, `[1, chunk]`.
          step: the function.
          carry: the first value.
        """
        if self.is_local:
            first = jnp.clip(first_of_chunk - self.reach, 0, self.length - self.piece)
            return step(pl.multiple_of(first, LANES), carry)
        if self.pieces == 1:
            return step(0, carry)
        # Converted to floats, because the vector unit reduces floats.
        first = jax.lax.div(bounds.first.astype(jnp.float32).min().astype(jnp.int32), self.piece)
        last = jax.lax.div(bounds.last.astype(jnp.float32).max().astype(jnp.int32), self.piece)
        return jax.lax.fori_loop(
            first, last + 1, lambda i, carry: step(pl.multiple_of(i * self.piece, LANES), carry), carry
        )

    def blocks(self, rows: int) -> dict[str, pl.BlockSpec]:
        """Returns the parts of arrays in a grid step (rows of the batch, heads, block of tokens), by name."""
        once = pl.Buffered(1) if is_small(self.chip) else None
        return {
            "plane": pl.BlockSpec((rows, self.block, LANES), lambda i, j, k: (i, k, j)),
            "whole_plane": pl.BlockSpec((rows, self.length, LANES), lambda i, j, k: (i, 0, j), pipeline_mode=once),
            "row": pl.BlockSpec((rows, 1, self.block), lambda i, j, k: (i, 0, k)),
            "whole_row": pl.BlockSpec((rows, 1, self.length), lambda i, j, k: (i, 0, 0)),
            "whole_angles": pl.BlockSpec((rows, self.size, self.length), lambda i, j, k: (i, 0, 0), pipeline_mode=once),
            "of_heads": pl.BlockSpec((rows, self.heads, 1, self.block), lambda i, j, k: (i, j, 0, k)),
            "whole_of_heads": pl.BlockSpec((rows, self.heads, 1, self.length), lambda i, j, k: (i, j, 0, 0)),
        }

    def call(
        self, kernel: Callable[..., None], name: str, inputs: list[Any], outputs: list[Any], **options: Any
    ) -> Any:
        """Runs a kernel, see `call_on_blocks`."""
        batch, length, width = inputs[0][1].shape
        rows = self.rows(batch)
        return call_on_blocks(
            kernel_call,
            functools.partial(kernel, self, rows),
            self.blocks(rows),
            inputs,
            outputs,
            grid=(batch // rows, width // LANES, length // self.block),
            on_chip=None if is_small(self.chip) else ON_CHIP,
            in_order=1,  # the first block of a row computes values for the other blocks
            chip=self.chip,
            name=self.name(name),
            **options,
        )


def flash_forward(planes: Any, angles: Array, bounds: Bounds, flash: Flash) -> tuple[Array, Array]:
    """Runs the forward kernel.

    Args:
      planes: queries, keys and values, `[batch, length, heads * size]` each.
      angles: `[batch, size, length]`, see `angle_rows`.
      bounds: see `bound_rows`.
      flash: the settings.

    Returns:
      The context `[batch, length, heads * size]`, and the binary logarithm of the denominator of softmax for each query
      `[batch, heads, 1, length]`.
    """

    def run(*arrays: Array) -> Any:
        batch, length, width = arrays[0].shape
        plane = jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)
        log_sums = jax.ShapeDtypeStruct((batch, width // flash.size, 1, length), jnp.float32)
        blocks = ("plane", "whole_plane", "whole_plane", "whole_angles", "row", "row")
        return flash.call(
            _forward_kernel,
            "forward",
            list(zip(blocks, arrays, strict=True)),
            [("plane", plane), ("of_heads", log_sums)],
            scratch_shapes=[pltpu.VMEM((flash.rows(batch), length, LANES), plane.dtype)],
        )

    axes = (_PLANE, _PLANE, _PLANE, _ANGLES, _ROW, _ROW)
    return on_mesh(run, axes, (_PLANE, _OF_HEADS))(*planes, angles, *bounds)


def flash_backward(
    planes: Any, angles: Array, bounds: Bounds, context: Array, log_sums: Array, of_context: Array, flash: Flash
) -> Any:
    """Runs the backward kernel: the gradients of queries, keys and values."""

    def run(*inputs: Array) -> Any:
        query, key, value, angles, first, last, context, log_sums, of_context = inputs
        batch, length, width = query.shape
        # The gradient of softmax subtracts the sum over keys of probs * of_probs, which equals the sum of
        # context * of_context over the elements of a head. A product with ones and zeros needs no copy.
        heads = jnp.arange(width // flash.size)
        is_of_head = jnp.equal(jnp.arange(width)[:, None] // flash.size, heads).astype(jnp.float32)
        products = context.astype(jnp.float32) * of_context.astype(jnp.float32)
        products = jnp.einsum("blf,fh->bhl", products, is_of_head, precision="highest")[:, :, None]
        plane = jax.ShapeDtypeStruct(query.shape, query.dtype)
        blocks = (
            "whole_plane", "plane", "plane", "whole_angles", "whole_plane", "whole_row", "whole_row",
            "whole_of_heads", "whole_of_heads",
        )  # fmt: skip
        arrays = query, key, value, angles, of_context, first, last, log_sums, products
        return flash.call(
            _backward_kernel,
            "backward",
            list(zip(blocks, arrays, strict=True)),
            [("whole_plane", plane), ("plane", plane), ("plane", plane)],
            scratch_shapes=[pltpu.VMEM((flash.rows(batch), LANES, length), jnp.float32)],
        )

    axes = (_PLANE, _PLANE, _PLANE, _ANGLES, _ROW, _ROW, _PLANE, _OF_HEADS, _PLANE)
    run_on_mesh = on_mesh(run, axes, (_PLANE, _PLANE, _PLANE))
    return run_on_mesh(*planes, angles, *bounds, context, log_sums, of_context)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(x: Array, kernel: Array, bias: Array | None, angles: Array, bounds: Bounds, flash: Flash) -> Array:
    return _attend_forward(x, kernel, bias, angles, bounds, flash)[0]


def _project(x: Array, kernel: Array, bias: Array | None) -> list[Array]:
    """`[batch, length, hidden]` -> queries, keys and values, `[batch, length, heads * size]` each."""
    planes = [x @ kernel[:, n] if bias is None else x @ kernel[:, n] + bias[n] for n in range(3)]
    return [nn.with_logical_constraint(plane, _PLANE) for plane in planes]


def _attend_forward(
    x: Array, kernel: Array, bias: Array | None, angles: Array, bounds: Bounds, flash: Flash
) -> tuple[Array, Any]:
    context, log_sums = flash_forward(_project(x, kernel, bias), angles, bounds, flash)
    return context, (x, kernel, bias, angles, bounds, context, log_sums)


def _attend_backward(flash: Flash, saved: Any, of_context: Array) -> tuple[Any, ...]:
    x, kernel, bias, angles, bounds, context, log_sums = saved
    planes, of_products = jax.vjp(_project, x, kernel, bias)
    of_planes = flash_backward(planes, angles, bounds, context, log_sums, of_context, flash)
    return *of_products(list(of_planes)), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _rotated(x: Array, angles: Array, size: int, back: bool = False) -> Array:
    """Rotates the heads of `[128, n]` by `[size, n]` angles, or back, in float32: see `rotary.rotate`."""
    cosines, sines = angles[: size // 2], angles[size // 2 :]
    sines = -sines if back else sines
    halves = []
    for first in range(0, LANES, size):
        a, b = x[first : first + size // 2], x[first + size // 2 : first + size]
        halves += [a * cosines - b * sines, b * cosines + a * sines]
    return jnp.concatenate(halves)


def _at_first_block(flash: Flash, rows: int, function: Callable[..., Any]) -> None:
    """Runs `function(row, tokens)` for all blocks of all rows, before the first block of a row."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        _each_block(flash, rows, function)


def _each_block(flash: Flash, rows: int, function: Callable[..., Any]) -> None:
    for row in range(rows):

        def run(block: Any, carry: int, row: int = row) -> int:
            function(row, pl.ds(pl.multiple_of(block * flash.block, LANES), flash.block))
            return carry

        jax.lax.fori_loop(0, flash.length // flash.block, run, 0)


def _forward_kernel(flash: Flash, rows: int, *refs: Ref) -> None:
    query_ref, key_ref, value_ref, angles_ref, first_ref, last_ref, context_ref, log_sums_ref, keys_ref = refs
    size, dtype = flash.size, query_ref.dtype

    def rotate_keys(row: int, at: Any) -> None:
        keys_ref[row, at, :] = _rotated(transposed(key_ref[row, at, :]), angles_ref[row, :, at], size).T.astype(dtype)

    _at_first_block(flash, rows, rotate_keys)
    for row in range(rows):
        for start in range(0, flash.block, flash.chunk):
            at, first_query = pl.ds(start, flash.chunk), pl.program_id(2) * flash.block + start
            bounds = Bounds(first_ref[row, :, at], last_ref[row, :, at])
            angles = angles_ref[row, :, pl.ds(pl.multiple_of(first_query, LANES), flash.chunk)]
            queries = _rotated(transposed(query_ref[row, at, :]), angles, size).astype(dtype).astype(jnp.float32)
            by_head = [only_head(head, size, queries * flash.scale).astype(dtype) for head in range(flash.heads)]

            def meet(
                first_key: Array, carry: Any, row: int = row, bounds: Bounds = bounds, queries: Any = by_head
            ) -> Any:
                piece = pl.ds(first_key, flash.piece)
                keys, values = keys_ref[row, piece, :], transposed(value_ref[row, piece, :])
                visible = _visible(first_key, flash.piece, bounds)
                results = []
                for head, (largest, sums, context) in enumerate(carry):
                    scores = jnp.where(visible, dot(keys, queries[head]), _MASKED)
                    maximum = jnp.maximum(largest, scores.max(0, keepdims=True))
                    probs, share = jnp.exp2(scores - maximum), jnp.exp2(largest - maximum)
                    values_of_head = values[head * size : (head + 1) * size].astype(dtype)
                    added = dot(values_of_head, probs.astype(dtype))
                    results.append((maximum, sums * share + probs.sum(0, keepdims=True), context * share + added))
                return tuple(results)

            def zeros(height: int) -> Array:
                return jnp.zeros((height, flash.chunk), jnp.float32)

            # The first maximum is below all masked scores: the first visible score reduces their share to zero.
            begin = (zeros(1) + 2 * _MASKED, zeros(1), zeros(size))
            heads = flash.meet(first_query, bounds, meet, (begin,) * flash.heads)
            for head, (largest, sums, _) in enumerate(heads):
                log_sums_ref[row, head, :, at] = largest + jnp.log2(sums)
            context = jnp.concatenate([context / sums for _, sums, context in heads])
            context_ref[row, at, :] = context.T.astype(dtype)


def _backward_kernel(flash: Flash, rows: int, *refs: Ref) -> None:
    query_ref, key_ref, value_ref, angles_ref, of_context_ref, first_ref, last_ref, log_sums_ref, *outputs = refs
    products_ref, of_query_ref, of_key_ref, of_value_ref, of_queries_ref = outputs
    size, dtype, scale = flash.size, query_ref.dtype, 1 / math.sqrt(flash.size)

    def rotate_queries(row: int, at: Any) -> None:
        queries = _rotated(transposed(query_ref[row, at, :]), angles_ref[row, :, at], size)
        of_query_ref[row, at, :] = queries.T.astype(dtype)  # the gradients replace them at the end
        of_queries_ref[row, :, at] = jnp.zeros_like(queries)

    _at_first_block(flash, rows, rotate_queries)
    for row in range(rows):
        for start in range(0, flash.block, flash.chunk):
            at, first_key = pl.ds(start, flash.chunk), pl.program_id(2) * flash.block + start
            chunk = pl.ds(pl.multiple_of(first_key, LANES), flash.chunk)
            angles = angles_ref[row, :, chunk]
            keys_t = _rotated(transposed(key_ref[row, at, :]), angles, size)
            keys, values = keys_t.T.astype(dtype), value_ref[row, at, :]
            bounds = Bounds(first_ref[row, :, chunk], last_ref[row, :, chunk])  # visibility is symmetric

            def meet(
                first_query: Array,
                carry: Any,
                row: int = row,
                first_key: Array = first_key,
                keys: Array = keys,
                values: Any = values,
                keys_t: Any = keys_t,
            ) -> Any:
                piece = pl.ds(first_query, flash.piece)
                queries, of_context = of_query_ref[row, piece, :], of_context_ref[row, piece, :]
                queries_t, of_context_t = transposed(queries) * flash.scale, transposed(of_context)
                visible = _visible(first_key, flash.chunk, Bounds(first_ref[row, :, piece], last_ref[row, :, piece]))
                results, of_queries = [], []
                for head, (of_keys, of_values) in enumerate(carry):
                    scores = dot(keys, only_head(head, size, queries_t).astype(dtype))
                    probs = jnp.exp2(jnp.where(visible, scores, _MASKED) - log_sums_ref[row, head, :, piece])
                    of_probs = dot(values, only_head(head, size, of_context_t).astype(dtype))
                    of_scores = (probs * (of_probs - products_ref[row, head, :, piece])).astype(dtype)
                    of_values += dot(probs.astype(dtype), of_context)
                    results.append((of_keys + dot(of_scores, queries), of_values))
                    of_queries.append(dot(keys_t[head * size : (head + 1) * size].astype(dtype), of_scores))
                of_queries_ref[row, :, piece] += jnp.concatenate(of_queries)
                return tuple(results)

            zeros = jnp.zeros((flash.chunk, LANES), jnp.float32)
            heads = flash.meet(first_key, bounds, meet, ((zeros, zeros),) * flash.heads)
            of_keys, of_values = (own_lanes(parts, size) for parts in zip(*heads, strict=True))
            of_key_ref[row, at, :] = _rotated(of_keys.T * scale, angles, size, back=True).T.astype(dtype)
            of_value_ref[row, at, :] = of_values.astype(dtype)

    def rotate_back(row: int, at: Any) -> None:
        of_queries = _rotated(of_queries_ref[row, :, at] * scale, angles_ref[row, :, at], size, back=True)
        of_query_ref[row, at, :] = of_queries.T.astype(dtype)

    @pl.when(pl.program_id(2) == flash.length // flash.block - 1)
    def _() -> None:
        _each_block(flash, rows, rotate_back)


def _visible(first_key: Array, keys: int, bounds: Bounds) -> Array:
    """Returns booleans `[keys, queries]` from the bounds of the queries `[1, queries]`."""
    places = first_key + jax.lax.broadcasted_iota(jnp.int32, (keys, bounds.first.shape[1]), 0)
    return (places >= bounds.first) & (places <= bounds.last)
