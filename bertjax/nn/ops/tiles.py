"""Loops over tiles of rows and heads, whose arrays stay in the cache of a CPU."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

# Bytes of the scores of a tile; about five arrays of this size are in use at a time. See RESULTS.md of the benchmarks.
TILE_BYTES = 3 << 20
SHORTEST = 128  # Fewer tokens gain nothing.


class Tile(NamedTuple):
    """The rows of the batch, and the heads, that are computed at a time."""

    rows: int
    heads: int


def tile_of(batch: int, length: int, heads: int, keys: int | None = None) -> Tile | None:
    """Returns the tile for attention scores `[batch, heads, length, keys]`; None if the scores fit in the cache.

    `keys` is the number of keys of a query; None: `length`.
    """
    of_head = 4 * length * (keys or length)
    if length < SHORTEST or batch * heads * of_head <= TILE_BYTES:
        return None
    rows = _divisor(batch, TILE_BYTES // (heads * of_head))
    return Tile(rows, _divisor(heads, TILE_BYTES // of_head))


def _divisor(number: int, most: int) -> int:
    """Returns the largest divisor of `number` that is at most `most`, or 1."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(most, 1))


def each_tile(function: Callable, by_head: Any, by_row: Any, shapes: Any, tile: Tile | None) -> Any:
    """Computes a function for one tile after the other, and returns the results for all tiles.

    Args:
      function: (part of `by_head`, part of `by_row`, number of the first head) -> part of the results.
      by_head: a tree of arrays `[batch, ..., heads, size]`.
      by_row: a tree of arrays `[batch, ...]`.
      shapes: a tree of the shapes and dtypes of the results, with axes as in `by_head`. A result with one row is the
        sum over all rows.
      tile: the tile; None: computes everything at a time.
    """
    if tile is None:
        return function(by_head, by_row, 0)
    batch, *_, heads, _ = jax.tree.leaves(by_head)[0].shape
    parts = heads // tile.heads

    def compute(number: Array, results: Any) -> Any:
        row, head = number // parts * tile.rows, number % parts * tile.heads

        def start(x: Array) -> tuple[Any, ...]:
            return (0 if len(x) == 1 else row, *[0] * (x.ndim - 3), head, 0)

        def of_heads(x: Array) -> Array:
            return jax.lax.dynamic_slice(x, start(x), (tile.rows, *x.shape[1:-2], tile.heads, x.shape[-1]))

        def of_rows(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, row, tile.rows)

        def update(x: Array, part: Array) -> Array:
            part = part + jax.lax.dynamic_slice(x, start(x), part.shape) if len(x) == 1 else part
            return jax.lax.dynamic_update_slice(x, part, start(x))

        part = function(jax.tree.map(of_heads, by_head), jax.tree.map(of_rows, by_row), head)
        return jax.tree.map(update, results, part)

    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, batch // tile.rows * parts, compute, empty)
