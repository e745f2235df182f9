"""Reads records into batches. The batch of a step is a function of (seed, step, records), for any number of hosts.

The random numbers of a transform, such as dynamic masking, are a function of (seed, index of the sequence in the order
of training). By default, a record that cannot be read raises an error. With `data.on_corrupt=skip`, an empty sequence
replaces the record, and the reader restarts at the same step, so that the steps of other sequences do not change.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.common.errors import UserError
from bertjax.data.batch import FOLLOWING, Batch, BatchSpec, take_rows
from bertjax.data.loading.order import Order, Span
from bertjax.data.loading.packing import pack
from bertjax.data.loading.readers.interface import SkippedRecords, UnreadableRecord, reader, split_span
from bertjax.data.loading.transforms import SeededTransform, apply_transforms
from bertjax.data.records import integrity
from bertjax.data.records.integrity import invalid_rows
from bertjax.data.records.layouts import Format
from bertjax.data.records.record_sets import RecordSet
from bertjax.distributed.mesh import Rows


class TrainingRecords:
    """The sequences with some indices in each padded batch of training.

    Attributes:
      files: the records.
      form: the format of the records.
      is_stream: whether rows continue the texts of the previous step (`data.stream`).
      block: random numbers are generated for blocks of `block` indices.
      seed: the seed of the random numbers.
    """

    def __init__(self, order: Order, max_predictions_per_seq: int, rows: np.ndarray):
        """Creates the source of the sequences with the indices `rows`."""
        self.files, self.is_stream, self.block = order.files, order.is_stream, order.batch_size
        self.form = _form(order.files, order.row.tokens, max_predictions_per_seq)
        # The third number of a seed is 0 for the order of files, 1 for arrangements, 2 and 3 for the transforms.
        self.seed = [order.seed, 0, 2]
        self._order, self._rows, self._groups = order, rows, order.groups_of(rows, order.batch_size)

    def records(self, step: int, skipped: SkippedRecords) -> Any:
        """Returns a source of a `Reader`, which starts at the step."""
        return reader().training_source(self._order, self.form, self._rows, self._groups, step, skipped)

    def spans(self, step: int) -> Iterator[Span]:
        """Yields a superset of the records of the step."""
        for lane in (lane for group in self._groups.tolist() for lane in self._order.lanes_of(group)):
            remaining = 2 * self._order.window
            for path, first, count in self._order.spans(lane, step):
                yield path, first, min(count, remaining)
                remaining -= count
                if remaining <= 0:
                    break

    def indices(self, step: int) -> np.ndarray:
        """Returns the index of each row in the order of the rows of all hosts and steps, `[rows]`."""
        return self._order.sequences_before + step * self._order.batch_size + self._rows

    def continues(self, step: int) -> np.ndarray:
        """Returns whether each row of a stream continues the same row of the previous step, `[rows]`."""
        return self._order.continues(self._rows, step)


class HeldoutRecords:
    """The first held-out records in file order; see `TrainingRecords` for the attributes and methods."""

    block = 256  # independent of the batch size

    def __init__(self, files: RecordSet, form: Format, seed: int, is_stream: bool, most: int, rows: int):
        """Creates the source of at most `most` records, with `rows` records per step."""
        self.files, self.form, self.seed, self.is_stream = files, form, [seed, 0, 3], is_stream
        self._most, self._rows = most, rows

    def records(self, step: int, skipped: SkippedRecords) -> Any:
        """Returns a source of a `Reader`."""
        parts = [part for span in self.spans(step) for part in split_span(span, skipped)]
        if self.is_stream:
            total = min(self._most, self.files.total)
            return reader().heldout_stream_source(parts, self.form, total, self._rows, step)
        return reader().heldout_source(parts, self.form, self._most, step, self._rows)

    def spans(self, step: int) -> Iterator[Span]:
        """Yields all records."""
        yield from ((path, 0, count) for path, count in zip(self.files.paths, self.files.counts))

    def indices(self, step: int) -> np.ndarray:
        """Returns the index of each row, `[rows]`."""
        return step * self._rows + np.arange(self._rows)

    def continues(self, step: int) -> np.ndarray:
        """Returns True for each row after the first step, `[rows]`."""
        return np.full(self._rows, step > 0)


RecordSource = TrainingRecords | HeldoutRecords


def train_batches(
    order: Order,
    spec: BatchSpec,
    max_predictions_per_seq: int,
    *,
    start: int = 0,
    rows: Rows = np.arange,
    transforms: Sequence[SeededTransform] = (),
) -> Iterator[Batch]:
    """Yields the padded (not packed) batches of training, from step `start`.

    Args:
      order: the order of the records.
      spec: the arrays of a batch.
      max_predictions_per_seq: the maximum number of predictions in a record.
      start: the first step, counted from 0.
      rows: number of rows of a batch -> the indices of the rows that this host reads, ascending.
      transforms: the transforms of the objectives.

    Yields:
      {name: NumPy array `[rows, ...]`} with the arrays of `spec` and the rows of this host. `sequence_weights` of a row
      is 0 if its record cannot be read. The iterator never ends.

    Raises:
      UserError: if a record cannot be read and `data.on_corrupt` is stop.
    """
    source = TrainingRecords(order, max_predictions_per_seq, rows(order.batch_size))
    yield from map(spec.select, _batches(source, start, transforms))


def packed_batches(
    order: Order,
    spec: BatchSpec,
    max_predictions_per_seq: int,
    *,
    multiple: int,
    start: int = 0,
    rows: Rows = np.arange,
    transforms: Sequence[SeededTransform] = (),
) -> Iterator[Batch]:
    """Yields the packed batches of training: the sequences of `train_batches`, see `packing.pack`.

    Args:
      order: the order of the records.
      spec: the arrays of a packed batch.
      max_predictions_per_seq: the maximum number of predictions in a record.
      multiple: a divisor of the number of rows. `Order.rows` returns the number of rows, which changes only between
        windows.
      start: the first step.
      rows: number of rows of a batch -> the indices of the rows that this host reads.
      transforms: the transforms of the objectives.
    """
    groups = order.groups_of(rows(count := order.rows(start, multiple)), count)  # the groups do not depend on `count`

    @functools.lru_cache(4)
    def kept(count: int) -> np.ndarray:
        """Returns the indices of this host's rows among all rows of its groups. Hosts can share a group."""
        share = count // order.groups
        return np.searchsorted((groups[:, None] * share + np.arange(share)).ravel(), rows(count))

    sequences = order.sequences_of(groups)
    source = TrainingRecords(order, max_predictions_per_seq, sequences)
    for step, batch in enumerate(_batches(source, start, transforms), start):
        count = order.rows(step, multiple)
        rows_of_groups = count // order.groups * len(groups)
        packed = pack(batch, spec, sequences, *order.packed(groups, step, count), rows_of_groups, order.row)
        yield packed if len(kept(count)) == rows_of_groups else take_rows(packed, kept(count))


def heldout_batches(
    files: RecordSet,
    spec: BatchSpec,
    length: int,
    max_predictions_per_seq: int,
    *,
    batch_size: int,
    max_sequences: int,
    rows: Rows = np.arange,
    transforms: Sequence[SeededTransform] = (),
    seed: int = 0,
    is_stream: bool = False,
) -> Iterator[Batch]:
    """Yields batches of the first `max_sequences` held-out records, for one epoch in file order.

    Args:
      files: the held-out records.
      spec: the arrays of a batch.
      length: the sequence length in tokens.
      max_predictions_per_seq: the maximum number of predictions in a record.
      batch_size: the number of rows in a batch. Rows of padding with weight 0 fill the last batch.
      max_sequences: the maximum number of records.
      rows: number of rows of a batch -> the indices of the rows that this host reads.
      transforms: the transforms of the objectives. Their random numbers do not depend on the batch size.
      seed: the seed of the random numbers.
      is_stream: whether each row reads a contiguous range of the records, one record per batch (`data.stream`).
    """
    form = _form(files, length, max_predictions_per_seq)
    source = HeldoutRecords(files, form, seed, is_stream, max_sequences, batch_size)
    for batch in _batches(source, 0, transforms):
        yield take_rows(spec.pad_rows(spec.select(batch), batch_size), rows(batch_size))


def _form(files: RecordSet, length: int, max_predictions_per_seq: int) -> Format:
    return Format(length, max_predictions_per_seq, files.layout, files.masking, files.vocab_size, files.token_types)


def _batches(source: RecordSource, step: int, transforms: Sequence[SeededTransform]) -> Iterator[Batch]:
    """Yields parsed batches after their transforms, from `step`."""
    batches = _parsed_batches(source, step)
    if source.is_stream:
        batches = _with_continues(batches, step, source)
    for number, batch in enumerate(batches, step):
        # Transforms run in this thread, because the threads of the reader would compete for Python's global lock.
        indices = source.indices(number)[: len(batch["input_ids"])]
        batch = apply_transforms(batch, transforms, indices, source.block, source.seed)
        batch.pop(FOLLOWING, None)
        yield batch


def _with_continues(batches: Iterator[Batch], step: int, source: RecordSource) -> Iterator[Batch]:
    """Adds the arrays `continues` `[rows]` and `FOLLOWING` `[rows]` to batches, see `bertjax.data.batch`."""
    end: Batch = {}
    for number, (batch, after) in enumerate(itertools.pairwise(itertools.chain(batches, [end])), step):
        following = np.full(len(batch["input_ids"]), -1, np.int32)
        if after:
            is_next = source.continues(number + 1) & (after["segments"][:, 0] > 0)
            following = np.where(is_next, after["input_ids"][:, 0], following)
        yield {**batch, "continues": source.continues(number).astype(np.int32), FOLLOWING: following}


def _parsed_batches(source: RecordSource, step: int) -> Iterator[Batch]:
    """Yields parsed batches from `step`. Restarts at a step with an unreadable record after the record is located."""
    skipped = dict(source.files.skipped)
    while True:
        try:
            for batch in reader().batches(source.records(step, skipped), source.form):
                if invalid_rows(batch, source.form):
                    problem = "values out of range"
                    break
                yield batch
                step += 1
            else:
                return
        except UnreadableRecord as error:
            problem = str(error)
        if not _locate_unreadable(source, step, skipped):
            raise UserError(
                f"config.data.records: a record cannot be read ({problem}); copy or prepare the records again"
            )


def _locate_unreadable(source: RecordSource, step: int, skipped: SkippedRecords) -> bool:
    """Adds the records that cannot be read to `skipped`, and returns whether there are such records.

    Raises:
      UserError: if `data.on_corrupt` is stop, or if no record can be read.
    """
    files, before = source.files, len(skipped)
    counts = dict(zip(files.paths, files.counts))
    suspects = {path: counts[path] for path, _, _ in source.spans(step) if path not in skipped}
    for path, numbers, fault in integrity.find_damaged_records(suspects, source.form):
        fault = f"{path}: record {numbers[0].start:,} {fault}"
        if files.on_corrupt == "stop":
            raise UserError(f"{fault}; copy or prepare the file again, or set config.data.on_corrupt=skip")
        skipped[path] = numbers
        print(f"{fault}; skipping {sum(map(len, numbers)):,} of its {counts[path]:,} records", flush=True)
    if sum(len(run) for numbers in skipped.values() for run in numbers) == sum(counts.values()):
        raise UserError("config.data.records: none of the records can be read; copy or prepare the records again")
    return len(skipped) > before
