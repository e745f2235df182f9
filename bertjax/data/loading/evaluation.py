"""Batches of examples for evaluation and prediction: each example occurs once, in few different shapes."""

from collections.abc import Iterator

import numpy as np

from bertjax.data.batch import RowSize
from bertjax.data.loading import packing
from bertjax.data.loading.examples import Examples, choose_row_size, next_power_of_two, padded_length

EVALUATED_TOKENS = 64  # tokens per example of a packed batch of predictions


def packed_evaluation(
    examples: Examples, batch_size: int, longest: int, multiple: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int, RowSize]]:
    """Yields the arguments of `Examples.packed` for batches of equal shape. Each example occurs in one batch.

    A batch has at most `batch_size * EVALUATED_TOKENS` tokens, rounded up to `multiple` rows.

    Args:
      examples: the examples to evaluate.
      batch_size: determines the number of tokens of a batch.
      longest: see `choose_row_size`.
      multiple: the number of rows of a batch is a multiple of this number.
    """
    if not len(examples):
        return
    row = choose_row_size(examples, batch_size, longest)
    rows = packing.best_fit(examples.tokens, row, np.random.default_rng(0))
    needed = next_power_of_two(rows.max() + 1)
    count = packing.round_up(min(needed, batch_size * EVALUATED_TOKENS / row.tokens), multiple)
    order = np.argsort(rows, kind="stable")
    rows, tokens = rows[order], examples.tokens[order]
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
