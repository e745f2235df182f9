"""Packing: several sequences share a row of a batch, so that few of its tokens are padding.

An arrangement assigns the sequences of a window to its steps. It is made of rows, not of sequences: best-fit decreasing
packs the whole window at once, which fills rows far better than the few sequences of a step would; then the rows are
dealt to the steps, so that each has as many sequences as the config says, in nearly the same number of rows.
"""

import collections
import math
from typing import NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.data.batch import Axis, Batch, BatchSpec, RowSize

PARTNERS = 8  # steps, at most, with which one exchanges packs: of a million steps, all pairs would be too many


class Arrangement(NamedTuple):
    """The sequences of each step, and their places in its rows.

    Attributes:
      order: `[steps, sequences]` indices of sequences, those of a row side by side; -1: none.
      rows, starts: `[steps, sequences]` row of the step, and first token in it.
      count: rows of a step; some may have fewer.
    """

    order: np.ndarray
    rows: np.ndarray
    starts: np.ndarray
    count: int


def shuffled(sequences: int, size: int, rng: np.random.Generator) -> Arrangement:
    """Arranges steps of `size` sequences in random order, each in a row of its own. `size` divides `sequences`."""
    order = rng.permutation(sequences).reshape(-1, size)
    return Arrangement(order, np.broadcast_to(np.arange(size), order.shape), np.zeros_like(order), size)


def in_order(sequences: int) -> Arrangement:
    """Arranges steps of one sequence, as they come."""
    order = np.arange(sequences)[:, None]
    return Arrangement(order, np.zeros_like(order), np.zeros_like(order), 1)


def arrange(lengths: np.ndarray, size: int, row: RowSize, rng: np.random.Generator) -> Arrangement:
    """Arranges the steps of a window so that few rows hold its sequences; which of equal length go where is random.

    Args:
      lengths: `[sequences]` tokens of each, from 1 to `row.tokens`.
      size: sequences of a step; if it does not divide their number, one step, at random, has fewer.
    """
    lengths, steps = np.asarray(lengths, np.int64), -(-len(lengths) // size)
    sizes = np.full(steps, size)
    sizes[rng.integers(steps)] -= size * steps - len(lengths)
    pack = best_fit(lengths, row, rng)
    step = deal(pack, lengths, sizes, rng)

    # Sort the sequences by step and row, and count both off.
    place = np.argsort(step * (pack.max() + 1) + pack, kind="stable")  # a lexsort takes three times as long
    pack, step, lengths = pack[place], step[place], lengths[place]
    is_first = np.diff(pack, prepend=-1) != 0  # first sequence of its row
    step_first = np.searchsorted(step, np.arange(steps))
    row_number = np.cumsum(is_first) - 1
    row_of_step = row_number - row_number[np.minimum(step_first, len(lengths) - 1)][step]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    starts = starts - starts[is_first][row_number]

    count = int(row_of_step.max()) + 1
    if len(lengths) == steps * size:
        return Arrangement(*(values.reshape(steps, size) for values in (place, row_of_step, starts)), count)
    column = np.arange(len(lengths)) - step_first[step]
    found = Arrangement(*(np.full((steps, size), fill) for fill in (-1, 0, 0)), count)
    for table, values in zip(found, (place, row_of_step, starts)):
        table[step, column] = values
    return found


def best_fit(lengths: np.ndarray, row: RowSize, rng: np.random.Generator) -> np.ndarray:
    """Packs by best-fit decreasing: longest first, each where it leaves the least room. Returns `[sequences]` packs.

    Sequences of one length are interchangeable, and so are packs with the same room: they are assigned many at a time.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= row.tokens:
        wrong = lengths.min() if lengths.min() < 1 else lengths.max()
        raise UserError(f"a sequence has {wrong} tokens, but a row holds 1 to {row.tokens}; prepare the data again")
    order = rng.permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    bounds = np.flatnonzero(np.diff(lengths[order])) + 1
    pack = np.empty(len(lengths), np.int64)
    members = np.zeros(len(lengths), np.int64)  # sequences of each pack
    by_room = [np.empty(0, np.int64)] * (row.tokens + 1)
    rooms = opened = 0  # bit `room` is set if there are packs with that room
    for same in np.split(order, bounds):
        size = int(lengths[same[0]])
        while len(same):
            fitting = rooms >> size
            if not fitting:
                new = -(-len(same) // min(row.sequences, row.tokens // size))
                by_room[row.tokens], rooms = np.arange(opened, opened + new), rooms | 1 << row.tokens
                opened += new
                continue
            room = size + (fitting & -fitting).bit_length() - 1
            packs, by_room[room] = np.split(by_room[room], [len(same)])
            now, same = np.split(same, [len(packs)])
            pack[now] = packs
            members[packs] += 1
            packs = packs[members[packs] < row.sequences]
            by_room[room - size] = np.concatenate([by_room[room - size], packs])
            for changed in (room, room - size):
                rooms = rooms | 1 << changed if len(by_room[changed]) else rooms & ~(1 << changed)
    return pack


def deal(pack: np.ndarray, lengths: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Deals packs to steps so that step i gets `sizes[i]` sequences, and all about as many rows.

    Returns the step of each sequence `[sequences]`. Splits packs, in `pack`, where the numbers do not work out.
    """
    members = np.bincount(pack)
    order = np.lexsort((rng.random(len(members)), -members))
    step = np.empty(len(members), np.int64)
    missing = sizes.copy()
    for first in range(0, len(order), len(sizes)):  # a pack for each step, the largest for what misses the most
        some = order[first : first + len(sizes)]
        to = np.lexsort((rng.random(len(sizes)), -missing))[: len(some)]
        step[some] = to
        missing[to] -= members[some]
    _even_out(step, members, missing)
    of_sequences = step[pack]

    # What is still too many: the shortest of each step, each in a pack of its own.
    found = np.flatnonzero(missing[of_sequences] < 0)
    found = found[np.lexsort((lengths[found], of_sequences[found]))]
    spare = found[numbers_in_row(of_sequences[found]) < -missing[of_sequences[found]]]
    of_sequences[spare] = np.repeat(np.arange(len(sizes)), np.maximum(missing, 0))
    pack[spare] = len(members) + np.arange(len(spare))
    return of_sequences


def _even_out(step: np.ndarray, members: np.ndarray, missing: np.ndarray) -> None:
    """Exchanges packs between steps that have too many sequences and steps that miss some, a few of them for each."""
    packs = {int(i): collections.defaultdict(list) for i in np.flatnonzero(missing)}
    for each in np.flatnonzero(np.isin(step, list(packs))):
        packs[int(step[each])][int(members[each])].append(int(each))
    for to in np.flatnonzero(missing > 0):
        for source in np.flatnonzero(missing < 0)[:PARTNERS]:
            while missing[to] > 0 > missing[source] and (found := _exchange(packs, source, to, missing)):
                more, fewer = found
                step[more], step[fewer] = to, source
                moved = members[more] - members[fewer]
                missing[to] -= moved
                missing[source] += moved


def _exchange(packs, source: int, to: int, missing: np.ndarray) -> tuple[int, int] | None:
    """Takes a pack of `source` and one of `to` that has fewer sequences, but by no more than `to` misses."""
    most = min(missing[to], -missing[source])
    for more in packs[source]:
        for fewer in packs[to]:
            if packs[source][more] and packs[to][fewer] and 0 < more - fewer <= most:
                one, other = packs[source][more].pop(), packs[to][fewer].pop()
                packs[to][more].append(one)
                packs[source][fewer].append(other)
                return one, other
    return None


def next_multiple(rows: float, multiple: int) -> int:
    """Rounds a number of rows up to a multiple of `multiple`."""
    return math.ceil(rows / multiple) * multiple


def numbers_in_row(rows: np.ndarray) -> np.ndarray:
    """The place of each sequence among those of its row; `rows` `[sequences]` ascend."""
    return np.arange(len(rows)) - np.searchsorted(rows, rows)


def first_in_row(numbers: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """Returns the number of each row's first sequence `[count]`, 0 for empty rows."""
    found = np.zeros(count, np.int32)
    found[rows[::-1]] = numbers[::-1]
    return found


def pack(
    batch: Batch,
    spec: BatchSpec,
    numbers: np.ndarray,
    rows: np.ndarray,
    starts: np.ndarray,
    count: int,
    row: RowSize,
) -> Batch:
    """Packs the sequences of a padded batch, one in each row, into `count` rows.

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
    inside = batch["segments"] > 0
    sizes, place_in_row = inside.sum(1), numbers_in_row(rows)
    ends = np.append(np.where(np.diff(rows), row.tokens, starts[1:]), row.tokens)
    if (starts + sizes > ends).any():
        raise UserError("the records are longer than when their lengths were read; copy or prepare them again")
    place = ((rows * row.tokens + starts)[:, None] + np.arange(row.tokens))[inside]
    is_predicted = _is_predicted(batch, spec)
    row_of_prediction = np.repeat(rows, is_predicted.sum(1))
    prediction = numbers_in_row(row_of_prediction)
    if (most := prediction.max(initial=-1) + 1) > row.predictions:
        raise UserError(
            f"config.packing: a row has {most} predicted words, but there is room for {row.predictions}; set "
            f"config.data.masked_lm_prob to what the records were made with, or config.packing=False"
        )

    def placed(axis: Axis, values: np.ndarray, padding: int) -> np.ndarray:
        """Returns values per token, sequence or prediction in their places of the packed rows."""
        if axis is Axis.TOKEN:
            packed = np.full(count * row.tokens, padding, values.dtype)
            packed[place] = np.broadcast_to(values, inside.shape)[inside]
            return packed.reshape(count, row.tokens)
        if axis is Axis.PREDICTION:
            packed = np.full((count, row.predictions), padding, values.dtype)
            packed[row_of_prediction, prediction] = values[is_predicted]
            return packed
        packed = np.full((count, row.sequences), padding, values.dtype)
        packed[rows, place_in_row] = values
        return packed

    computed = {
        "segments": (place_in_row[:, None] + 1).astype(np.int32),
        "positions": np.arange(row.tokens, dtype=np.int32),
        "first_tokens": starts.astype(np.int32),
    }
    result = {}
    for name, array in spec.items():
        if array.axis is Axis.ROW:
            continue
        values = computed[name] if name in computed else batch[name]
        if array.is_position:
            values = (values + starts[:, None]).astype(array.dtype)
        result[name] = placed(array.axis, values, array.padding)
    return result | {"dropout_rows": first_in_row(numbers, rows, count)}


def _is_predicted(batch: Batch, spec: BatchSpec) -> np.ndarray:
    """Returns where there are predictions, booleans `[sequences, predictions]`."""
    if any(array.axis is Axis.PREDICTION for array in spec.values()):
        return batch["word_weights"] > 0
    return np.zeros((len(batch["segments"]), 0), bool)
