"""Packing: several sequences share a row of a batch, which leaves few tokens of padding.

A window is a number of consecutive steps whose sequences are packed together. An arrangement gives each sequence of a
window its step, and its row in this step. Best-fit decreasing packs the whole window into bins, because many sequences
fill bins much better than the few sequences of one step. Then the bins are dealt to the steps and become rows. All
steps have about the same number of rows. A step has as many sequences as the config sets, or, with `equal_tokens`,
any number of sequences.
"""

import collections
import math
from typing import NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.data.batch import Axis, Batch, BatchSpec, RowSize

SIZES_PER_DOUBLING = 8  # of `round_up_coarsely`
MAX_PARTNERS = 8  # A step exchanges bins with at most 8 steps, because all pairs of a million steps are too many.

Bins = dict[int, dict[int, list[int]]]  # {step: {number of sequences: bins of the step}}


class Arrangement(NamedTuple):
    """The sequences of each step, with their rows and their positions in the rows.

    Attributes:
      order: `[steps, sequences]`, the indices of the sequences. The sequences of a row are adjacent; -1 is padding.
      rows: `[steps, sequences]`, the row of each sequence in the step.
      starts: `[steps, sequences]`, the position of the first token of each sequence in the row.
      row_count: the largest number of rows of a step.
    """

    order: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    row_count: int


def shuffled_arrangement(sequences: int, size: int, rng: np.random.Generator) -> Arrangement:
    """Returns steps of `size` sequences in random order, with one sequence per row. `size` divides `sequences`."""
    order = rng.permutation(sequences).reshape(-1, size)
    return Arrangement(order, np.broadcast_to(np.arange(size), order.shape), np.zeros_like(order), size)


def ordered_arrangement(sequences: int) -> Arrangement:
    """Returns steps of one sequence each, in order."""
    order = np.arange(sequences)[:, None]
    return Arrangement(order, np.zeros_like(order), np.zeros_like(order), 1)


def arrange(
    lengths: np.ndarray, size: int, row: RowSize, rng: np.random.Generator, equal_tokens: bool = False
) -> Arrangement:
    """Arranges the steps of a window in few rows. Sequences of the same length have random places.

    Args:
      lengths: `[sequences]`, the tokens of each sequence, from 1 to `row.tokens`.
      size: the number of sequences of a step. If `size` does not divide the number of sequences, one random step has
        fewer sequences.
      row: the size of a row.
      rng: the generator of random numbers.
      equal_tokens: whether the steps have about the same number of tokens, in place of the same number of sequences.
        `size` is then the mean number of sequences of a step.
    """
    lengths, steps = np.asarray(lengths, np.int64), -(-len(lengths) // size)
    if equal_tokens:
        bins = best_fit(lengths, row, rng)
        if bins.max() + 1 < steps:  # Bins with fewer sequences are at least as many as the steps.
            bins = best_fit(lengths, row._replace(sequences=len(lengths) // steps), rng)
        # Almost all bins are full, so that the same number of bins has about the same number of tokens.
        step = (rng.permutation(bins.max() + 1) % steps)[bins]
        size = int(np.bincount(step).max())
    else:
        sizes = np.full(steps, size)
        sizes[rng.integers(steps)] -= size * steps - len(lengths)
        bins = best_fit(lengths, row, rng)
        step = deal(bins, lengths, sizes, rng)

    # Sort the sequences by step and bin. Then number the rows of each step, and add up the lengths in each row.
    order = np.argsort(step * (bins.max() + 1) + bins, kind="stable")  # np.lexsort takes three times as long.
    bins, step, lengths = bins[order], step[order], lengths[order]
    is_first_in_row = np.diff(bins, prepend=-1) != 0
    first_of_step = np.searchsorted(step, np.arange(steps))
    row_number = np.cumsum(is_first_in_row) - 1
    row_in_step = row_number - row_number[np.minimum(first_of_step, len(lengths) - 1)][step]
    starts = np.cumsum(lengths) - lengths
    starts = starts - starts[is_first_in_row][row_number]

    row_count = int(row_in_step.max()) + 1
    if len(lengths) == steps * size:
        shape = (steps, size)
        return Arrangement(order.reshape(shape), row_in_step.reshape(shape), starts.reshape(shape), row_count)
    column = np.arange(len(lengths)) - first_of_step[step]
    tables = [np.full((steps, size), padding) for padding in (-1, 0, 0)]
    for table, values in zip(tables, (order, row_in_step, starts)):
        table[step, column] = values
    return Arrangement(tables[0], tables[1], tables[2], row_count)


def best_fit(lengths: np.ndarray, row: RowSize, rng: np.random.Generator) -> np.ndarray:
    """Packs sequences into bins by best-fit decreasing.

    The longest sequences come first. A sequence goes to the bin with the least room that suffices. Sequences of the
    same length are interchangeable, and bins with the same room are interchangeable. Therefore one iteration can place
    many sequences.

    Args:
      lengths: `[sequences]`, the tokens of each sequence.
      row: the size of a bin.
      rng: the generator of random numbers.

    Returns:
      The bin of each sequence, `[sequences]`.

    Raises:
      UserError: if a sequence is empty or longer than a row.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= row.tokens:
        wrong = lengths.min() if lengths.min() < 1 else lengths.max()
        raise UserError(f"a sequence has {wrong} tokens, but a row holds 1 to {row.tokens}; prepare the data again")
    order = rng.permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    bounds = np.flatnonzero(np.diff(lengths[order])) + 1
    bins = np.empty(len(lengths), np.int64)
    counts = np.zeros(len(lengths), np.int64)  # the number of sequences of each bin
    by_room = [np.empty(0, np.int64)] * (row.tokens + 1)
    rooms = opened = 0  # Bit `room` of `rooms` is set if there are bins with this room.
    for waiting in np.split(order, bounds):  # sequences of the same length
        size = int(lengths[waiting[0]])
        while len(waiting):
            fitting = rooms >> size
            if not fitting:
                new = -(-len(waiting) // min(row.sequences, row.tokens // size))
                by_room[row.tokens], rooms = np.arange(opened, opened + new), rooms | 1 << row.tokens
                opened += new
                continue
            room = size + (fitting & -fitting).bit_length() - 1
            chosen, by_room[room] = np.split(by_room[room], [len(waiting)])
            placed, waiting = np.split(waiting, [len(chosen)])
            bins[placed] = chosen
            counts[chosen] += 1
            open_bins = chosen[counts[chosen] < row.sequences]
            by_room[room - size] = np.concatenate([by_room[room - size], open_bins])
            for changed in (room, room - size):
                rooms = rooms | 1 << changed if len(by_room[changed]) else rooms & ~(1 << changed)
    return bins


def deal(bins: np.ndarray, lengths: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Assigns bins to steps, so that step i has `sizes[i]` sequences and all steps have about the same number of bins.

    If no assignment of whole bins gives each step its number of sequences, sequences move to new bins. The function
    then changes `bins`.

    Args:
      bins: `[sequences]`, the bin of each sequence.
      lengths: `[sequences]`, the tokens of each sequence.
      sizes: `[steps]`, the number of sequences of each step.
      rng: the generator of random numbers.

    Returns:
      The step of each sequence, `[sequences]`.
    """
    counts = np.bincount(bins)
    order = np.lexsort((rng.random(len(counts)), -counts))
    step = np.empty(len(counts), np.int64)
    missing = sizes.copy()
    # Each round deals one bin to each step. The largest bin goes to the step that misses the most sequences.
    for first in range(0, len(order), len(sizes)):
        dealt = order[first : first + len(sizes)]
        steps = np.lexsort((rng.random(len(sizes)), -missing))[: len(dealt)]
        step[dealt] = steps
        missing[steps] -= counts[dealt]
    _even_out(step, counts, missing)
    step_of_sequence = step[bins]

    # Move the shortest sequences out of the steps with too many sequences. Each moved sequence gets a new bin.
    surplus = np.flatnonzero(missing[step_of_sequence] < 0)
    surplus = surplus[np.lexsort((lengths[surplus], step_of_sequence[surplus]))]
    steps = step_of_sequence[surplus]
    moved = surplus[index_in_row(steps) < -missing[steps]]
    step_of_sequence[moved] = np.repeat(np.arange(len(sizes)), np.maximum(missing, 0))
    bins[moved] = len(counts) + np.arange(len(moved))
    return step_of_sequence


def _even_out(step: np.ndarray, counts: np.ndarray, missing: np.ndarray) -> None:
    """Exchanges bins between steps with too many sequences and steps with too few.

    Args:
      step: `[bins]`, the step of each bin. The function changes this array.
      counts: `[bins]`, the number of sequences of each bin.
      missing: `[steps]`, the number of sequences that each step lacks; negative for too many sequences. The function
        changes this array.
    """
    bins: Bins = {int(number): collections.defaultdict(list) for number in np.flatnonzero(missing)}
    for number in np.flatnonzero(np.isin(step, list(bins))).tolist():
        bins[int(step[number])][int(counts[number])].append(number)
    for target in np.flatnonzero(missing > 0).tolist():
        for source in np.flatnonzero(missing < 0)[:MAX_PARTNERS].tolist():
            while missing[target] > 0 > missing[source] and (exchanged := _exchange(bins, source, target, missing)):
                larger, smaller = exchanged
                step[larger], step[smaller] = target, source
                moved = counts[larger] - counts[smaller]
                missing[target] -= moved
                missing[source] += moved


def _exchange(bins: Bins, source: int, target: int, missing: np.ndarray) -> tuple[int, int] | None:
    """Exchanges a bin of `source` for a smaller bin of `target`, and returns both; None if no exchange helps.

    Neither step may pass from too many sequences to too few, or from too few to too many.
    """
    limit = min(missing[target], -missing[source])
    for larger_count in bins[source]:
        for smaller_count in bins[target]:
            both_exist = bins[source][larger_count] and bins[target][smaller_count]
            if both_exist and 0 < larger_count - smaller_count <= limit:
                larger, smaller = bins[source][larger_count].pop(), bins[target][smaller_count].pop()
                bins[target][larger_count].append(larger)
                bins[source][smaller_count].append(smaller)
                return larger, smaller
    return None


def round_up(rows: float, multiple: int) -> int:
    """Returns the least multiple of a number that is at least `rows`."""
    return math.ceil(rows / multiple) * multiple


def round_up_coarsely(rows: int, multiple: int) -> int:
    """Returns a multiple of a number that is at least `rows`. Few different results need few compilations.

    Without `multiple`, the result is at most about an eighth larger than `rows`.
    """
    unit = max(1, (1 << (rows - 1).bit_length()) // SIZES_PER_DOUBLING)
    return round_up(round_up(rows, unit), multiple)


def index_in_row(rows: np.ndarray) -> np.ndarray:
    """Returns the index of each sequence among the sequences of the same row, `[sequences]`.

    Args:
      rows: `[sequences]`, the row of each sequence, ascending.
    """
    return np.arange(len(rows)) - np.searchsorted(rows, rows)


def starts_in_rows(rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the position of the first token of each sequence in its row, `[sequences]`.

    Args:
      rows: `[sequences]`, the row of each sequence, ascending.
      lengths: `[sequences]`, the tokens of each sequence.
    """
    starts = np.cumsum(lengths) - lengths
    return starts - starts[np.searchsorted(rows, rows)]


def first_in_row(values: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Returns the value of the first sequence of each row, `[count]`; 0 for empty rows.

    Args:
      values: `[sequences]`.
      rows: `[sequences]`, the row of each sequence, ascending.
      count: the number of rows.
    """
    first = np.zeros(count, np.int32)
    first[rows[::-1]] = values[::-1]
    return first


def pack(
    batch: Batch,
    spec: BatchSpec,
    numbers: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    count: int,
    row: RowSize,
) -> Batch:
    """Packs the sequences of a padded batch, which has one sequence per row, into `count` rows.

    Args:
      batch: the padded batch, `[sequences, ...]`.
      spec: the arrays of the packed batch. `segments` numbers the sequences of a row from 1. `positions`,
        `first_tokens` and `dropout_rows` are computed, see `bertjax.data.batch.PACKING_ARRAYS`.
      numbers: `[sequences]`, the row of each sequence in the padded batch of all hosts.
      rows: `[sequences]`, the packed row of each sequence, ascending.
      starts: `[sequences]`, the position of the first token of each sequence in its packed row.
      count: the number of packed rows.
      row: the size of a packed row.

    Returns:
      The arrays of the spec, `[count, ...]`.

    Raises:
      UserError: if a sequence or the predictions of a row do not fit.
    """
    is_token = batch["segments"] > 0
    sizes, index = is_token.sum(1), index_in_row(rows)
    ends = np.append(np.where(np.diff(rows), row.tokens, starts[1:]), row.tokens)
    if (starts + sizes > ends).any():
        raise UserError("the records are longer than when their lengths were read; copy or prepare them again")
    token_place = ((rows * row.tokens + starts)[:, None] + np.arange(row.tokens))[is_token]
    is_predicted = _is_predicted(batch, spec)
    row_of_prediction = np.repeat(rows, is_predicted.sum(1))
    prediction = index_in_row(row_of_prediction)
    if (predictions := prediction.max(initial=-1) + 1) > row.predictions:
        raise UserError(
            f"config.packing = True: a row has {predictions} predicted words, but the limit is {row.predictions}; set "
            f"config.data.masked_lm_prob to the value that the records were made with, or set config.packing=False"
        )

    def packed(axis: Axis, values: np.ndarray, padding: int) -> np.ndarray:
        """Returns the packed array of values per token, sequence or prediction."""
        if axis is Axis.TOKEN:
            array = np.full(count * row.tokens, padding, values.dtype)
            array[token_place] = np.broadcast_to(values, is_token.shape)[is_token]
            return array.reshape(count, row.tokens)
        if axis is Axis.PREDICTION:
            array = np.full((count, row.predictions), padding, values.dtype)
            array[row_of_prediction, prediction] = values[is_predicted]
            return array
        array = np.full((count, row.sequences), padding, values.dtype)
        array[rows, index] = values
        return array

    computed = {
        "segments": (index[:, None] + 1).astype(np.int32),
        "positions": np.arange(row.tokens, dtype=np.int32),
        "first_tokens": starts.astype(np.int32),
    }
    arrays = {}
    for name, array_spec in spec.items():
        if array_spec.axis is Axis.ROW:
            continue
        values = computed[name] if name in computed else batch[name]
        if array_spec.is_position:
            values = (values + starts[:, None]).astype(array_spec.dtype)
        arrays[name] = packed(array_spec.axis, values, array_spec.padding)
    return arrays | {"dropout_rows": first_in_row(numbers, rows, count)}


def _is_predicted(batch: Batch, spec: BatchSpec) -> np.ndarray:
    """Returns booleans `[sequences, predictions]` that are True for predictions."""
    if any(array.axis is Axis.PREDICTION for array in spec.values()):
        return batch["word_weights"] > 0
    return np.zeros((len(batch["segments"]), 0), bool)
