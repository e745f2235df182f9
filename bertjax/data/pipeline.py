"""Reads records into batches. The batch of a step is a function of (seed, step, records), for any number of hosts.

The records of a set form one list, divided into `lanes` ranges of equal size. Each lane fills the same rows of every
batch and reads its own range: its files in random order in each epoch, their records shuffled in windows. File order
and shuffling come from generators seeded with (seed, lane, epoch or window), so any step can be computed without the
steps before it. A host reads only the lanes of its rows, and so opens only the files in their ranges.

With dynamic masking, a row is masked by random numbers that are seeded with (seed, its place in the stream of all
rows). A record that cannot be read stops the reader; or it is found, replaced by a row without tokens, and the reader
starts again at this step, so that all other rows stay where they were.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from bertjax.config import UserError
from bertjax.data import faults, layouts
from bertjax.data.faults import impossible
from bertjax.data.layouts import Format
from bertjax.data.masking import Draws, Rules, draw, mask_tokens
from bertjax.data.records import RecordSet
from bertjax.sharding.mesh import Batch

MAX_LANES = 64
SHUFFLE_WINDOW = 4096  # records of a lane that are shuffled together; a window may span two epochs
GROUP = 128  # records of a lane that are moved together: one by one takes longer than parsing
HELDOUT_DRAWS = 256  # rows whose masks are drawn together, whatever the batch size
READ_BUFFER = 1 << 20  # bytes

Span = tuple[str, int, int]  # path, first record, number of records


class Stream(NamedTuple):
    """The records of one split, in the order of their rows.

    Attributes:
      records: (step, lost) -> a dataset of the serialized records of each step from this one on, `[rows]`; `lost` has
        the records of each path that are replaced by empty ones.
      spans: step -> what is read for this step, and perhaps ahead of it.
      places: step -> the place of each row in the stream of all hosts `[rows]`; its mask is a function of it.
      block, seed: masks are drawn for `block` places together, from `seed` and the number of the block.
    """

    records: Callable
    spans: Callable[[int], Iterator[Span]]
    places: Callable[[int], np.ndarray]
    block: int
    seed: list[int]


def train_batches(
    files: RecordSet,
    length: int,
    max_predictions_per_seq: int,
    *,
    batch_size: int,
    seed: int,
    start: int = 0,
    rows: np.ndarray | None = None,
    rules: Rules | None = None,
) -> Iterator[Batch]:
    """Yields the batches of steps `start`, `start + 1`, ...; if `rows` (ascending) is given, only these rows.

    A batch holds the arrays of `layouts.features`, `[rows, ...]`, except that `next_sentence_labels` and the added
    `next_sentence_weights` are `[rows]`; the weights are 1, and 0 for rows whose record cannot be read. `rules` masks
    records with dynamic masking. Raises `UserError` if there are fewer records than lanes, or if one cannot be read.
    """
    lanes = math.gcd(batch_size, MAX_LANES)
    if files.total < lanes:
        raise UserError(
            f"{files.total} training records are too few for config.batch_size = {batch_size}: add text, increase "
            f"data.dupe_factor, or reduce the batch size"
        )
    width = batch_size // lanes
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    own = np.unique(rows // width)
    form = _form(files, length, max_predictions_per_seq)

    def records(step, lost):
        return _lanes(files, form, rows, lanes, width, seed, step, lost)

    def spans(step):
        for lane in own:
            remaining = 2 * window_size(files, lane, lanes) + max(GROUP, width)
            for path, first, count in lane_spans(files, lane, lanes, seed, step * width):
                yield path, first, min(count, remaining)
                remaining -= count
                if remaining <= 0:
                    break

    def places(step):
        return step * batch_size + rows

    # In the third place of its seeds, file order has 0, and windows have 1.
    stream = Stream(records, spans, places, batch_size, [seed, 0, 2])
    return _batches(files, form, stream, start, rules)


def _lanes(files: RecordSet, form: Format, rows: np.ndarray, lanes: int, width: int, seed: int, step: int, lost):
    """A dataset of the serialized rows `rows` of each batch from `step` on; a lane has `width` rows of a batch."""
    from bertjax.data.tf import tf

    own, start, steps = np.unique(rows // width), step * width, max(1, GROUP // width)
    wanted = np.searchsorted(own, rows // width) * width + rows % width  # other hosts use other rows of a lane
    is_all = len(rows) == len(own) * width

    def spans(lane):
        for span in lane_spans(files, int(lane), lanes, seed, start):
            yield from _readable(span, lost)

    def orders(lane):
        orders = window_orders(files, int(lane), lanes, seed, start)
        yield next(orders)[start % window_size(files, int(lane), lanes) :]
        yield from orders

    def lane_records(lane):
        order = tf.data.Dataset.from_generator(orders, output_signature=tf.TensorSpec([None], tf.int64), args=(lane,))
        size = tf.constant([window_size(files, i, lanes) for i in range(lanes)], tf.int64)[lane]
        windows = tf.data.Dataset.zip((_read(spans, form, lane).batch(size), order)).map(tf.gather)
        return windows.rebatch(steps * width)

    def by_step(group):
        group = tf.transpose(tf.reshape(group, [len(own), steps, width]), [1, 0, 2])
        group = tf.reshape(group, [steps, len(own) * width])
        return group if is_all else tf.gather(group, wanted, axis=1)

    lanes_of_rows = tf.data.Dataset.from_tensor_slices(own.astype(np.int64))
    groups = lanes_of_rows.interleave(lane_records, cycle_length=len(own), num_parallel_calls=tf.data.AUTOTUNE)
    return groups.batch(len(own), drop_remainder=True).map(by_step).unbatch()


def _read(spans: Callable[..., Iterator[tuple[str, int, int, int]]], form: Format, *arguments):
    """A dataset of the serialized records of `spans(*arguments)`, see `_readable`."""
    from bertjax.data.tf import tf

    number = tf.TensorSpec([], tf.int64)
    spans = tf.data.Dataset.from_generator(
        spans, output_signature=(tf.TensorSpec([], tf.string), number, number, number), args=arguments
    )

    def read(path, first, count, missing):
        found = tf.data.TFRecordDataset(path, buffer_size=READ_BUFFER).skip(first).take(count)
        found = found.apply(tf.data.experimental.assert_cardinality(count))  # a shorter file would shift all rows
        return found.concatenate(tf.data.Dataset.from_tensors(tf.constant(layouts.empty_record(form))).repeat(missing))

    return spans.flat_map(read)


def _readable(span: Span, lost: Mapping[str, tuple[range, ...]]) -> Iterator[tuple[str, int, int, int]]:
    """Divides a span into parts: path, first record, number of records, number of empty rows that follow."""
    path, first, count = span
    end = first + count
    for gap in lost.get(path, ()):
        gap = range(max(first, gap.start), min(end, gap.stop))
        if gap:
            yield path, first, gap.start - first, len(gap)
            first = gap.stop
    if first < end:
        yield path, first, end - first, 0


def lane_range(files: RecordSet, lane: int, lanes: int) -> range:
    """Returns the indices of a lane's records in the set."""
    return range(lane * files.total // lanes, (lane + 1) * files.total // lanes)


def window_size(files: RecordSet, lane: int, lanes: int) -> int:
    return min(SHUFFLE_WINDOW, len(lane_range(files, lane, lanes)))


def lane_spans(files: RecordSet, lane: int, lanes: int, seed: int, start: int) -> Iterator[Span]:
    """Yields what is read in reading order, starting with the window of record `start`."""
    own = lane_range(files, lane, lanes)
    spans, before = [], 0
    for path, count in zip(files.paths, files.counts):
        first, last = max(own.start, before), min(own.stop, before + count)
        if first < last:
            spans.append((path, first - before, last - first))
        before += count

    window = window_size(files, lane, lanes)
    epoch, skip = divmod(start - start % window, len(own))
    while True:
        for i in np.random.default_rng([seed, lane, 0, epoch]).permutation(len(spans)):
            path, first, count = spans[i]
            if skip < count:
                yield path, first + skip, count - skip
            skip = max(0, skip - count)
        epoch += 1


def window_orders(files: RecordSet, lane: int, lanes: int, seed: int, start: int) -> Iterator[np.ndarray]:
    """Yields the permutation of each window `[window_size]`, starting with the window of record `start`."""
    size = window_size(files, lane, lanes)
    window = start // size
    while True:
        yield np.random.default_rng([seed, lane, 1, window]).permutation(size)
        window += 1


def heldout_batches(
    files: RecordSet,
    length: int,
    max_predictions_per_seq: int,
    *,
    batch_size: int,
    max_sequences: int,
    rows: np.ndarray | None = None,
    rules: Rules | None = None,
    seed: int = 0,
) -> Iterator[Batch]:
    """Yields batches of the first `max_sequences` records, once and in order; if `rows` is given, only these rows.

    The last batch is padded with rows of zeros, which have weight 0. Dynamic masking is a function of `seed` and the
    place of a record, whatever the batch size.
    """
    form = _form(files, length, max_predictions_per_seq)

    def spans(step):
        yield from ((path, 0, count) for path, count in zip(files.paths, files.counts))

    def records(step, lost):
        parts = [part for span in spans(step) for part in _readable(span, lost)]
        dataset = _read(lambda: iter(parts), form).take(max_sequences).skip(step * batch_size)
        return dataset.batch(batch_size)

    def places(step):
        return step * batch_size + np.arange(batch_size)

    stream = Stream(records, spans, places, HELDOUT_DRAWS, [seed, 0, 3])
    for batch in _batches(files, form, stream, 0, rules):
        missing = batch_size - len(batch["input_ids"])
        batch = {name: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()}
        yield batch if rows is None else {name: x[rows] for name, x in batch.items()}


def _form(files: RecordSet, length: int, max_predictions_per_seq: int) -> Format:
    return Format(length, max_predictions_per_seq, files.layout, files.masking, files.vocab_size)


def _batches(files: RecordSet, form: Format, stream: Stream, step: int, rules: Rules | None) -> Iterator[Batch]:
    """Yields parsed and masked batches from `step` on; starts again at a step whose records cannot be read."""
    from bertjax.data.tf import tf

    if form.masking == "dynamic" and rules is None:
        raise ValueError("records with dynamic masking need the rules of masking")
    unreadable = (
        tf.errors.DataLossError,
        tf.errors.FailedPreconditionError,  # too few records
        tf.errors.InvalidArgumentError,  # not of this layout
        tf.errors.NotFoundError,
        tf.errors.UnknownError,  # from masking
    )
    lost = dict(files.lost)
    while True:
        dataset = stream.records(step, lost)
        dataset = dataset.map(functools.partial(layouts.parse, form=form), num_parallel_calls=tf.data.AUTOTUNE)
        if form.masking == "dynamic":
            mask = functools.partial(_masked, stream=stream, rules=rules)
            dataset = dataset.enumerate(step).map(mask, num_parallel_calls=tf.data.AUTOTUNE)
        try:
            for batch in dataset.prefetch(4).as_numpy_iterator():
                if impossible(batch, form):
                    problem = "impossible values"
                    break
                yield batch
                step += 1
            else:
                return
        except unreadable as error:
            problem = error.message.splitlines()[0][:300]
        if not _find_lost(files, form, stream.spans(step), lost):
            raise UserError(f"a record cannot be read: {problem}")


def _find_lost(files: RecordSet, form: Format, spans: Iterator[Span], lost: dict[str, tuple[range, ...]]) -> bool:
    """Adds to `lost` the records that cannot be read; whether there are any. Raises `UserError` if none may be lost."""
    counts, before = dict(zip(files.paths, files.counts)), len(lost)
    suspects = {path: counts[path] for path, _, _ in spans if path not in lost}
    for path, numbers, fault in faults.find(suspects, form):
        fault = f"{path}: record {numbers[0].start:,} {fault}"
        if files.on_corrupt == "stop":
            raise UserError(f"{fault}; copy or prepare the file again, or set config.data.on_corrupt=skip")
        lost[path] = numbers
        print(f"{fault}; skipping {sum(map(len, numbers)):,} of its {counts[path]:,} records", flush=True)
    if sum(len(run) for numbers in lost.values() for run in numbers) == files.total:
        raise UserError("none of the records can be read; copy or prepare them again")
    return len(lost) > before


def _masked(step, batch, *, stream: Stream, rules: Rules):
    """Masks a batch inside tf.data, so that it overlaps with the training step."""
    from bertjax.data.tf import tf

    def mask(step, ids, inside):
        draws = _draws(stream.places(int(step))[: len(ids)], stream.block, stream.seed, ids.shape[1], rules)
        masked, positions, labels, counts = mask_tokens(ids, inside.sum(1), draws, rules)
        used = np.arange(rules.max_predictions_per_seq) < counts[:, None]
        return masked, positions, labels, used.astype(np.float32)

    types = (tf.int32, tf.int32, tf.int32, tf.float32)
    names = ("input_ids", "masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    found = tf.numpy_function(mask, [step, batch["input_ids"], batch["input_mask"]], types)
    return {**batch, **dict(zip(names, found))}


def _draws(places: np.ndarray, block: int, seed: list[int], length: int, rules: Rules) -> Draws:
    """The random numbers of rows at ascending places: each a function of its place, drawn in blocks of `block` rows."""
    first, last = places[0] // block, places[-1] // block
    drawn = [draw(np.random.default_rng([*seed, number]), block, length, rules) for number in range(first, last + 1)]
    draws = drawn[0] if len(drawn) == 1 else Draws(*map(np.concatenate, zip(*drawn)))
    return draws if len(places) == len(draws.order) else draws.of_rows(places - first * block)
