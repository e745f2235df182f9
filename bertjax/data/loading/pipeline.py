"""Reads records into batches. The batch of a step is a function of (seed, step, records), for any number of hosts.

The random numbers of a transform, such as dynamic masking, are a function of (seed, index of the sequence in the order
of training). If a record cannot be read, an error is raised. With `data.on_corrupt=skip`, an empty sequence replaces
the record, and the reader restarts at the same step, so that the steps of other sequences do not change.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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

HELDOUT_BLOCK = 256  # the `RecordSource.block` of held-out data. It is independent of the batch size.


class RecordSource(NamedTuple):
    """The records of a split in reading order, and the seeds of their random numbers.

    Attributes:
      records: (step, skipped records) -> a source of a `Reader`, which starts at the step.
      spans: step -> a superset of the records of the step.
      indices: step -> the index of each row in the order of the rows of all hosts and steps, `[rows]`.
      block: random numbers are generated for blocks of `block` indices.
      seed: the seed of the random numbers.
      continues: step -> whether each row continues the same row of the previous step, `[rows]`; None unless
        `data.stream`.
    """

    records: Callable[[int, SkippedRecords], Any]
    spans: Callable[[int], Iterator[Span]]
    indices: Callable[[int], np.ndarray]
    block: int
    seed: list[int]
    continues: Callable[[int], np.ndarray] | None = None


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
      start: the first step.
      rows: number of rows of a batch -> the indices of the rows that this host reads.
      transforms: the transforms of the objectives.

    Yields:
      The arrays of `spec`. The weight of a row is 0 if its record cannot be read.

    Raises:
      UserError: if a record cannot be read and `data.on_corrupt` is stop.
    """
    form = _form(order.files, order.row.tokens, max_predictions_per_seq)
    source = _training_source(order, form, rows(order.batch_size))
    yield from map(spec.select, _batches(order.files, form, source, start, transforms))


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
    form = _form(order.files, order.row.tokens, max_predictions_per_seq)
    groups = order.groups_of(rows(count := order.rows(start, multiple)), count)  # the groups do not depend on `count`

    @functools.lru_cache(4)
    def kept(count: int) -> np.ndarray:
        """Returns the indices of this host's rows among all rows of its groups. Hosts can share a group."""
        share = count // order.groups
        return np.searchsorted((groups[:, None] * share + np.arange(share)).ravel(), rows(count))

    sequences = order.sequences_of(groups)
    source = _training_source(order, form, sequences)
    for step, batch in enumerate(_batches(order.files, form, source, start, transforms), start):
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

    def spans(step: int) -> Iterator[Span]:
        yield from ((path, 0, count) for path, count in zip(files.paths, files.counts))

    def records(step: int, skipped: SkippedRecords) -> Any:
        parts = [part for span in spans(step) for part in split_span(span, skipped)]
        if is_stream:
            return reader().heldout_stream_source(parts, form, min(max_sequences, files.total), batch_size, step)
        return reader().heldout_source(parts, form, max_sequences, step, batch_size)

    def indices(step: int) -> np.ndarray:
        return step * batch_size + np.arange(batch_size)

    def continues(step: int) -> np.ndarray:
        return np.full(batch_size, step > 0)

    source = RecordSource(records, spans, indices, HELDOUT_BLOCK, [seed, 0, 3], continues if is_stream else None)
    for batch in _batches(files, form, source, 0, transforms):
        yield take_rows(spec.pad_rows(spec.select(batch), batch_size), rows(batch_size))


def _training_source(order: Order, form: Format, rows: np.ndarray) -> RecordSource:
    """Returns the source of the sequences with the indices `rows` in each padded batch."""
    groups = order.groups_of(rows, order.batch_size)
    lanes = [lane for group in groups.tolist() for lane in order.lanes_of(group)]

    def records(step: int, skipped: SkippedRecords) -> Any:
        return reader().training_source(order, form, rows, groups, step, skipped)

    def spans(step: int) -> Iterator[Span]:
        for lane in lanes:
            remaining = 2 * order.window
            for path, first, count in order.spans(lane, step):
                yield path, first, min(count, remaining)
                remaining -= count
                if remaining <= 0:
                    break

    def indices(step: int) -> np.ndarray:
        return order.sequences_before + step * order.batch_size + rows

    continues = functools.partial(order.continues, rows) if order.is_stream else None
    # The third number of a seed is 0 for the order of files, 1 for arrangements, 2 and 3 for the transforms.
    return RecordSource(records, spans, indices, order.batch_size, [order.seed, 0, 2], continues)


def _form(files: RecordSet, length: int, max_predictions_per_seq: int) -> Format:
    return Format(length, max_predictions_per_seq, files.layout, files.masking, files.vocab_size, files.token_types)


def _batches(
    files: RecordSet, form: Format, source: RecordSource, step: int, transforms: Sequence[SeededTransform]
) -> Iterator[Batch]:
    """Yields parsed batches after their transforms, from `step`."""
    batches = _parsed_batches(files, form, source, step)
    if source.continues is not None:
        batches = _with_continues(batches, step, source.continues)
    for number, batch in enumerate(batches, step):
        # Transforms run in this thread, because the threads of the reader would compete for Python's global lock.
        indices = source.indices(number)[: len(batch["input_ids"])]
        batch = apply_transforms(batch, transforms, indices, source.block, source.seed)
        batch.pop(FOLLOWING, None)
        yield batch


def _with_continues(batches: Iterator[Batch], step: int, continues: Callable[[int], np.ndarray]) -> Iterator[Batch]:
    """Adds the arrays `continues` `[rows]` and `FOLLOWING` `[rows]` to batches, see `bertjax.data.batch`."""
    end: Batch = {}
    for number, (batch, after) in enumerate(itertools.pairwise(itertools.chain(batches, [end])), step):
        following = np.full(len(batch["input_ids"]), -1, np.int32)
        if after:
            is_next = continues(number + 1) & (after["segments"][:, 0] > 0)
            following = np.where(is_next, after["input_ids"][:, 0], following)
        yield {**batch, "continues": continues(number).astype(np.int32), FOLLOWING: following}


def _parsed_batches(files: RecordSet, form: Format, source: RecordSource, step: int) -> Iterator[Batch]:
    """Yields parsed batches from `step`. Restarts at a step with an unreadable record after the record is located."""
    skipped = dict(files.skipped)
    while True:
        try:
            for batch in reader().batches(source.records(step, skipped), form):
                if invalid_rows(batch, form):
                    problem = "values out of range"
                    break
                yield batch
                step += 1
            else:
                return
        except UnreadableRecord as error:
            problem = str(error)
        if not _locate_unreadable(files, form, source.spans(step), skipped):
            raise UserError(
                f"config.data.records: a record cannot be read ({problem}); copy or prepare the records again"
            )


def _locate_unreadable(files: RecordSet, form: Format, spans: Iterator[Span], skipped: SkippedRecords) -> bool:
    """Adds the records that cannot be read to `skipped`, and returns whether there are any.

    Raises:
      UserError: if `data.on_corrupt` is stop, or if no record can be read.
    """
    counts, before = dict(zip(files.paths, files.counts)), len(skipped)
    suspects = {path: counts[path] for path, _, _ in spans if path not in skipped}
    for path, numbers, fault in integrity.find_damaged_records(suspects, form):
        fault = f"{path}: record {numbers[0].start:,} {fault}"
        if files.on_corrupt == "stop":
            raise UserError(f"{fault}; copy or prepare the file again, or set config.data.on_corrupt=skip")
        skipped[path] = numbers
        print(f"{fault}; skipping {sum(map(len, numbers)):,} of its {counts[path]:,} records", flush=True)
    if sum(len(run) for numbers in skipped.values() for run in numbers) == sum(counts.values()):
        raise UserError("config.data.records: none of the records can be read; copy or prepare the records again")
    return len(skipped) > before
