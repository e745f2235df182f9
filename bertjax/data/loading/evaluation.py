"""Batches of examples for evaluation and prediction: each example occurs once, in few different shapes."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import RowSize
from bertjax.data.loading import packing
from bertjax.data.loading.examples import (
    Examples,
    cost_of_row,
    next_power_of_two,
    padded_length,
    row_lengths,
)

EVALUATED_TOKENS = 64  # tokens per example of a packed batch of predictions
LEAST_TOKENS = 4  # mean tokens of the examples of a full row. The same number for all batches gives few shapes.


class _PackedRows(NamedTuple):
    """Examples in packed rows, divided into batches of equal shape.

    Attributes:
      row: the size of a row.
      rows: the row of each example, `[examples]`.
      batches: the number of batches.
      row_count: the number of rows of a batch: a power of two, or the most rows of a batch, so that few shapes are
        compiled.
    """

    row: RowSize
    rows: np.ndarray
    batches: int
    row_count: int

    @property
    def cost(self) -> float:
        """The time of all rows, with rows of padding."""
        return self.batches * self.row_count * cost_of_row(self.row)


def _pack(examples: Examples, row: RowSize, tokens: int) -> _PackedRows:
    """Packs examples into rows for batches of about `tokens` tokens."""
    rows = packing.best_fit(examples.tokens, row, np.random.default_rng(0))
    most, needed = math.ceil(tokens / row.tokens), int(rows.max()) + 1
    batches = math.ceil(needed / most)
    return _PackedRows(row, rows, batches, min(next_power_of_two(math.ceil(needed / batches)), most))


def packed_evaluation(
    examples: Examples, batch_size: int, longest: int, multiple: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int, RowSize]]:
    """Yields the arguments of `Examples.packed` for batches of equal shape. Each example occurs in one batch.

    A batch has at most `batch_size * EVALUATED_TOKENS` tokens, rounded up to `multiple` rows. The rows have the size
    that costs the least time. The size does not depend on `multiple`, so that the rows do not depend on the devices.

    Args:
      examples: the examples to evaluate.
      batch_size: determines the number of tokens of a batch.
      longest: see `row_lengths`.
      multiple: the number of rows of a batch is a multiple of this number.
    """
    if not len(examples):
        return
    longest_example = int(examples.tokens.max())
    if row_lengths(longest_example, longest) == [longest_example]:  # Few different lengths need few compilations.
        longest_example = max(longest_example, min(longest, packing.round_up_coarsely(longest_example, 1)))
    sizes = [RowSize(length, max(1, length // LEAST_TOKENS)) for length in row_lengths(longest_example, longest)]
    packed = min((_pack(examples, row, batch_size * EVALUATED_TOKENS) for row in sizes), key=lambda packed: packed.cost)
    count, row = packing.round_up(packed.row_count, multiple), packed.row
    order = np.argsort(packed.rows, kind="stable")
    rows, tokens = packed.rows[order], examples.tokens[order]
    starts = packing.starts_in_rows(rows, tokens)
    for first in range(0, rows[-1] + 1, count):
        in_batch = slice(*np.searchsorted(rows, [first, first + count]))
        yield order[in_batch], rows[in_batch] - first, starts[in_batch], count, row


def evaluation_batches(examples: Examples, batch_size: int, longest: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields padded batches in which each example occurs once, the longest examples first.

    Args:
      examples: the examples to evaluate.
      batch_size: examples of a batch.
      longest: the largest padded length.

    Yields:
      The examples of a batch, `[batch_size]`, where -1 pads the last batch; and the padded length.
    """
    order = np.argsort(-examples.lengths, kind="stable")
    for first in range(0, len(order), batch_size):
        rows = order[first : first + batch_size]
        length = padded_length(int(examples.lengths[rows].max()), longest)
        yield np.pad(rows, (0, batch_size - len(rows)), constant_values=-1), length
