"""Reads records into batches. The batch of a step is a function of (seed, step, records), for any number of hosts.

The transforms of a sequence, such as dynamic masking, take random numbers that are seeded with (seed, place of the
sequence in the order of all sequences). If a record cannot be read, the reader stops. With `data.on_corrupt=skip` the
record is located and replaced by a sequence without tokens, and the reader starts again at the same step, so that all
other sequences keep their steps.
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
from bertjax.data.loading.readers.interface import UnreadableRecord, readable, reader
from bertjax.data.loading.transforms import SeededTransform, transformed
from bertjax.data.records import integrity
from bertjax.data.records.integrity import invalid_rows
from bertjax.data.records.layouts import Format
from bertjax.data.records.record_sets import RecordSet
from bertjax.distributed.mesh import Rows

HELDOUT_DRAWS = 256  # rows of held-out data whose random numbers are drawn together, for any batch size

LostRecords = dict[str, tuple[range, ...]]  # {path: numbers of the records that are replaced by empty ones}


class Source(NamedTuple):
    """The records of one split, in the order of their rows.

    Attributes:
      records: (step, lost records) -> the reader's source of the records of each step from this one on.
      spans: step -> the records that are read for this step, and perhaps for the next steps.
      places: step -> the place of each row in the order of all hosts `[rows]`, which seeds its random numbers.
      block: the random numbers of `block` places are drawn together.
      seed: the seed of the random numbers.
      continues: step -> whether each row continues the row of the step before `[rows]`; None unless `data.stream`.
    """

    records: Callable[[int, LostRecords], Any]
    spans: Callable[[int], Iterator[Span]]
    places: Callable[[int], np.ndarray]
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
    """Yields the padded batches of training from a step on.

    Args:
      order: the order of the records.
      spec: the arrays of a batch.
      max_predictions_per_seq: the most predictions in a record.
      start: the first step.
      rows: the rows of a batch that this host reads.
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
    """Yields the batches of `train_batches` with several sequences in a row, see `packing.pack`.

    Args:
      order: the order of the records.
      spec: the arrays of a packed batch.
      max_predictions_per_seq: the most predictions in a record.
      multiple: the number of rows is a multiple of this number. It is `Order.rows`, and changes only between windows.
      start: the first step.
      rows: the rows of a batch that this host reads.
      transforms: the transforms of the objectives.
    """
    form = _form(order.files, order.row.tokens, max_predictions_per_seq)
    groups = order.groups_of(rows(count := order.rows(start, multiple)), count)  # the same groups for any count

    @functools.lru_cache(4)
    def kept(count: int) -> np.ndarray:
        """Returns the rows of the groups that this host keeps. Another host may keep the other rows."""
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
    """Yields batches of the first `max_sequences` records, once and in order.

    Args:
      files: the held-out records.
      spec: the arrays of a batch.
      length: the length of a sequence.
      max_predictions_per_seq: the most predictions in a record.
      batch_size: rows of a batch. Rows of padding, whose weight is 0, fill the last batch.
      max_sequences: the most records.
      rows: the rows of a batch that this host reads.
      transforms: the transforms of the objectives. Their random numbers are the same for any batch size.
      seed: the seed of the random numbers.
      is_stream: each row reads a range of the records, one record after the other.
    """
    form = _form(files, length, max_predictions_per_seq)

    def spans(step: int) -> Iterator[Span]:
        yield from ((path, 0, count) for path, count in zip(files.paths, files.counts))

    def records(step: int, lost: LostRecords) -> Any:
        parts = [part for span in spans(step) for part in readable(span, lost)]
        if is_stream:
            return reader().side_by_side(parts, form, min(max_sequences, files.total), batch_size, step)
        return reader().in_order(parts, form, max_sequences, step, batch_size)

    def places(step: int) -> np.ndarray:
        return step * batch_size + np.arange(batch_size)

    def continues(step: int) -> np.ndarray:
        return np.full(batch_size, step > 0)

    source = Source(records, spans, places, HELDOUT_DRAWS, [seed, 0, 3], continues if is_stream else None)
    for batch in _batches(files, form, source, 0, transforms):
        yield take_rows(spec.pad_rows(spec.select(batch), batch_size), rows(batch_size))


def _training_source(order: Order, form: Format, rows: np.ndarray) -> Source:
    """Returns the source of the sequences `rows` of each batch."""
    groups = order.groups_of(rows, order.batch_size)
    lanes = [lane for group in groups.tolist() for lane in order.lanes_of(group)]

    def records(step: int, lost: LostRecords) -> Any:
        return reader().grouped(order, form, rows, groups, step, lost)

    def spans(step: int) -> Iterator[Span]:
        for lane in lanes:
            remaining = 2 * order.window
            for path, first, count in order.spans(lane, step):
                yield path, first, min(count, remaining)
                remaining -= count
                if remaining <= 0:
                    break

    def places(step: int) -> np.ndarray:
        return order.sequences_before + step * order.batch_size + rows

    continues = functools.partial(order.continues, rows) if order.is_stream else None
    # The third number of a seed is 0 for the order of files, and 1 for arrangements.
    return Source(records, spans, places, order.batch_size, [order.seed, 0, 2], continues)


def _form(files: RecordSet, length: int, max_predictions_per_seq: int) -> Format:
    return Format(length, max_predictions_per_seq, files.layout, files.masking, files.vocab_size, files.token_types)


def _batches(
    files: RecordSet, form: Format, source: Source, step: int, transforms: Sequence[SeededTransform]
) -> Iterator[Batch]:
    """Yields parsed and transformed batches from `step` on."""
    batches = _parsed(files, form, source, step)
    if source.continues is not None:
        batches = _continued(batches, step, source.continues)
    for number, batch in enumerate(batches, step):
        # The threads of the reader would wait for each other in Python if they transformed batches.
        places = source.places(number)[: len(batch["input_ids"])]
        batch = transformed(batch, transforms, places, source.block, source.seed)
        batch.pop(FOLLOWING, None)
        yield batch


def _continued(batches: Iterator[Batch], step: int, continues: Callable[[int], np.ndarray]) -> Iterator[Batch]:
    """Adds `continues` `[rows]` to batches, and for transforms `FOLLOWING` `[rows]`, see `bertjax.data.batch`."""
    end: Batch = {}
    for number, (batch, after) in enumerate(itertools.pairwise(itertools.chain(batches, [end])), step):
        following = np.full(len(batch["input_ids"]), -1, np.int32)
        if after:
            is_next = continues(number + 1) & (after["segments"][:, 0] > 0)
            following = np.where(is_next, after["input_ids"][:, 0], following)
        yield {**batch, "continues": continues(number).astype(np.int32), FOLLOWING: following}


def _parsed(files: RecordSet, form: Format, source: Source, step: int) -> Iterator[Batch]:
    """Yields parsed batches from `step` on. Starts again at a step whose records cannot be read."""
    lost = dict(files.lost)
    while True:
        try:
            for batch in reader().batches(source.records(step, lost), form):
                if invalid_rows(batch, form):
                    problem = "impossible values"
                    break
                yield batch
                step += 1
            else:
                return
        except UnreadableRecord as error:
            problem = str(error)
        if not _locate_lost(files, form, source.spans(step), lost):
            raise UserError(f"a record cannot be read: {problem}")


def _locate_lost(files: RecordSet, form: Format, spans: Iterator[Span], lost: LostRecords) -> bool:
    """Adds the records that cannot be read to `lost`, and returns whether there are any.

    Raises:
      UserError: if `data.on_corrupt` is stop, or if no record can be read.
    """
    counts, before = dict(zip(files.paths, files.counts)), len(lost)
    suspects = {path: counts[path] for path, _, _ in spans if path not in lost}
    for path, numbers, fault in integrity.find_damaged_records(suspects, form):
        fault = f"{path}: record {numbers[0].start:,} {fault}"
        if files.on_corrupt == "stop":
            raise UserError(f"{fault}; copy or prepare the file again, or set config.data.on_corrupt=skip")
        lost[path] = numbers
        print(f"{fault}; skipping {sum(map(len, numbers)):,} of its {counts[path]:,} records", flush=True)
    if sum(len(run) for numbers in lost.values() for run in numbers) == sum(counts.values()):
        raise UserError("none of the records can be read; copy or prepare them again")
    return len(lost) > before
