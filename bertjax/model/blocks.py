"""Loops over blocks of rows and heads, whose intermediate arrays stay in a CPU's cache."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# What the scores of a block take. About five such arrays are in use at once.
BLOCK_BYTES = 4 << 20
# Attention of fewer tokens is no faster in blocks.
SHORTEST = 128


class Block(NamedTuple):
    """Rows of the batch and heads that are computed at a time."""

    rows: int
    heads: int


def block_of(batch: int, length: int, heads: int) -> Block | None:
    """Returns the largest block of `[batch, heads, length, length]` scores that fits; None: they need no blocks."""
    score_bytes = 4 * length**2
    if length < SHORTEST or batch * heads * score_bytes <= BLOCK_BYTES:
        return None
    of_row = _largest_divisor(heads, BLOCK_BYTES // score_bytes)
    return Block(_largest_divisor(batch, BLOCK_BYTES // (heads * score_bytes)), of_row)


def _largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`; at least 1."""
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= max(1, most))


def each_block(function: Callable, by_head, by_row, results, block: Block):
    """Returns `results` filled with what `function` returns for each block, in a loop.

    Args:
      function: takes the parts of `by_head` and `by_row` and the number of the first head; returns the part of
        `results`.
      by_head: a tree of arrays `[batch, ..., heads, size]`, as `results` are.
      by_row: a tree of arrays `[batch, ...]`.
      results: a tree of arrays whose values do not matter, or of their shapes and types.
    """
    batch, heads = jax.tree.leaves(by_head)[0].shape[0], jax.tree.leaves(by_head)[0].shape[-2]
    parts = heads // block.heads

    def body(number, results):
        row, head = number // parts * block.rows, number % parts * block.heads

        def start(x):
            return (row, *[0] * (x.ndim - 3), head, 0)

        def of_heads(x):
            return jax.lax.dynamic_slice(x, start(x), (block.rows, *x.shape[1:-2], block.heads, x.shape[-1]))

        def of_rows(x):
            return jax.lax.dynamic_slice_in_dim(x, row, block.rows)

        part = function(jax.tree.map(of_heads, by_head), jax.tree.map(of_rows, by_row), head)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice(x, y, start(x)), results, part)

    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results)
    return jax.lax.fori_loop(0, batch // block.rows * parts, body, empty)
