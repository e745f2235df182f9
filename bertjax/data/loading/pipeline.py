"""Reads records into batches. The batch of a step is a function of (seed, step, records), for any number of hosts.

What objectives add to a sequence, such as its masks with dynamic masking, takes random numbers that are seeded with
(seed, its place in the order of all sequences). A record that cannot be read stops the reader; or it is found, replaced
by a sequence without tokens, and the reader starts again at this step, so that all others stay where they were.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.data.loading.order import Order, Span
from bertjax.data.loading.packing import pack_pretraining
from bertjax.data.loading.readers.interface import UnreadableRecord, readable, reader
from bertjax.data.loading.transforms import FOLLOWING, Addition, added
from bertjax.data.records import integrity
from bertjax.data.records.integrity import invalid_rows
from bertjax.data.records.layouts import Format
from bertjax.data.records.record_sets import RecordSet
from bertjax.distributed.mesh import Batch, Rows

HELDOUT_DRAWS = 256  # rows whose random numbers are drawn together, whatever the batch size


class Stream(NamedTuple):
    """The records of one split, in the order of their rows.

    Attributes:
      records: (step, lost) -> the reader's source of the records of each step from this one on, `[rows]`; `lost` has
        the records of each path that are replaced by empty ones.
      spans: step -> what is read for this step, and perhaps ahead of it.
      places: step -> the place of each row in the stream of all hosts `[rows]`, by which its random numbers are drawn.
      block, seed: random numbers are drawn for `block` places together, from `seed` and the number of the block.
    """

    records: Callable
    spans: Callable[[int], Iterator[Span]]
    places: Callable[[int], np.ndarray]
    block: int
    seed: list[int]


def train_batches(
    order: Order,
    max_predictions_per_seq: int,
    *,
    start: int = 0,
    rows: Rows = np.arange,
    additions: Sequence[Addition] = (),
) -> Iterator[Batch]:
    """Yields the batches of steps `start`, `start + 1`, ..., of which each host reads its `rows`.

    A batch holds the arrays of `layouts.NAMES_IN_BATCH`, `[rows, ...]`, except that `pair_labels` and the added
    `sequence_weights` are `[rows]`; the weights are 1, and 0 for rows whose record cannot be read. Those of words are
    in it only if the records are masked, or if one of the `additions` adds them. Raises `UserError` if a record cannot
    be read.

    Of a stream there is also `goes_on` `[rows]`, int32: 1 where a row goes on from the step before.
    """
    form = _form(order.files, order.row.tokens, max_predictions_per_seq)
    own = rows(order.batch_size)
    goes_on = functools.partial(order.continues, own) if order.is_stream else None
    return _batches(order.files, form, _stream(order, form, own), start, additions, goes_on)


def packed_batches(
    order: Order,
    max_predictions_per_seq: int,
    *,
    multiple: int,
    start: int = 0,
    rows: Rows = np.arange,
    additions: Sequence[Addition] = (),
    kinds: Mapping[str, str] = {},
) -> Iterator[Batch]:
    """As `train_batches`, the same sequences in fewer rows, a multiple of `multiple`; see `pack_pretraining`.

    The number of rows is that of `Order.rows`, and changes, if at all, from window to window. `kinds`: whether an array
    that is added is per "token" or "sequence".
    """
    form = _form(order.files, order.row.tokens, max_predictions_per_seq)
    groups = order.groups_of(rows(count := order.rows(start, multiple)), count)  # the same for any count

    @functools.lru_cache(4)
    def kept(count):
        """Returns which of the groups' rows this host keeps: it may share them with others."""
        share = count // order.groups
        return np.searchsorted((groups[:, None] * share + np.arange(share)).ravel(), rows(count))

    own = order.sequences_of(groups)
    for step, batch in enumerate(_batches(order.files, form, _stream(order, form, own), start, additions), start):
        count = order.rows(step, multiple)
        there = count // order.groups * len(groups)
        batch = pack_pretraining(batch, own, *order.packed(groups, step, count), there, order.row, kinds)
        yield batch if len(kept(count)) == there else {name: x[kept(count)] for name, x in batch.items()}


def _stream(order: Order, form: Format, rows: np.ndarray) -> Stream:
    """The sequences `rows` of each batch."""
    groups = order.groups_of(rows, order.batch_size)
    own = [lane for group in groups.tolist() for lane in order.lanes_of(group)]

    def records(step, lost):
        return reader().grouped(order, form, rows, groups, step, lost)

    def spans(step):
        for lane in own:
            remaining = 2 * order.window
            for path, first, count in order.spans(lane, step):
                yield path, first, min(count, remaining)
                remaining -= count
                if remaining <= 0:
                    break

    def places(step):
        return order.sequences_before + step * order.batch_size + rows

    # In the third place of its seeds, file order has 0, and arrangements have 1.
    return Stream(records, spans, places, order.batch_size, [order.seed, 0, 2])


def heldout_batches(
    files: RecordSet,
    length: int,
    max_predictions_per_seq: int,
    *,
    batch_size: int,
    max_sequences: int,
    rows: Rows = np.arange,
    additions: Sequence[Addition] = (),
    seed: int = 0,
    is_stream: bool = False,
) -> Iterator[Batch]:
    """Yields batches of the first `max_sequences` records, once and in order; of each batch, this host's `rows`.

    The last batch is padded with rows of zeros, which have weight 0. Additions are functions of `seed` and the place
    of a record, whatever the batch size. Of a stream each row has a range of the records, and reads on in it.
    """
    form = _form(files, length, max_predictions_per_seq)

    def spans(step):
        yield from ((path, 0, count) for path, count in zip(files.paths, files.counts))

    def records(step, lost):
        parts = [part for span in spans(step) for part in readable(span, lost)]
        if is_stream:
            return reader().side_by_side(parts, form, min(max_sequences, files.total), batch_size, step)
        return reader().in_order(parts, form, max_sequences, step, batch_size)

    def places(step):
        return step * batch_size + np.arange(batch_size)

    stream = Stream(records, spans, places, HELDOUT_DRAWS, [seed, 0, 3])
    goes_on = (lambda step: np.full(batch_size, step > 0)) if is_stream else None
    for batch in _batches(files, form, stream, 0, additions, goes_on):
        missing = batch_size - len(batch["input_ids"])
        batch = {name: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()}
        yield {name: x[rows(batch_size)] for name, x in batch.items()}


def _form(files: RecordSet, length: int, max_predictions_per_seq: int) -> Format:
    form = length, max_predictions_per_seq, files.layout, files.masking, files.vocab_size
    return Format(*form, files.token_types)


def _batches(
    files: RecordSet, form: Format, stream: Stream, step: int, additions, goes_on: Callable | None = None
) -> Iterator[Batch]:
    """Yields parsed batches with all additions from `step` on; `goes_on` as for `_continued`, if the rows do."""
    batches = _parsed(files, form, stream, step)
    for number, batch in enumerate(batches if goes_on is None else _continued(batches, step, goes_on), step):
        # Not in the reader's threads, which would wait for each other here.
        found = added(batch, additions, stream.places(number)[: len(batch["input_ids"])], stream.block, stream.seed)
        found.pop(FOLLOWING, None)
        yield found


def _continued(batches: Iterator[Batch], step: int, goes_on: Callable[[int], np.ndarray]) -> Iterator[Batch]:
    """Adds to batches whether their rows go on from the step before, and for additions the first token of the step
    after: `FOLLOWING` `[rows]`, -1 where there is none. `goes_on`: step -> `[rows]`."""
    for number, (batch, after) in enumerate(itertools.pairwise(itertools.chain(batches, [None])), step):
        following = np.full(len(batch["input_ids"]), -1, np.int32)
        if after is not None:
            is_next = goes_on(number + 1) & (after["segments"][:, 0] > 0)
            following = np.where(is_next, after["input_ids"][:, 0], following)
        yield {**batch, "goes_on": goes_on(number).astype(np.int32), FOLLOWING: following}


def _parsed(files: RecordSet, form: Format, stream: Stream, step: int) -> Iterator[Batch]:
    """Yields parsed batches from `step` on; starts again at a step whose records cannot be read."""
    lost = dict(files.lost)
    while True:
        try:
            for batch in reader().batches(stream.records(step, lost), form):
                if invalid_rows(batch, form):
                    problem = "impossible values"
                    break
                yield batch
                step += 1
            else:
                return
        except UnreadableRecord as error:
            problem = str(error)
        if not _find_lost(files, form, stream.spans(step), lost):
            raise UserError(f"a record cannot be read: {problem}")


def _find_lost(files: RecordSet, form: Format, spans: Iterator[Span], lost: dict[str, tuple[range, ...]]) -> bool:
    """Adds to `lost` the records that cannot be read; whether there are any. Raises `UserError` if none may be lost."""
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
