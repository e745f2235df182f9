"""Reads records into batches. The batch of a step is a function of (seed, step, records), for any number of hosts.

The records of a set form one list, divided into `lanes` ranges of equal size. Each lane fills the same rows of every
batch and reads its own range: its files in random order in each epoch, their records shuffled in windows. File order
and shuffling come from generators seeded with (seed, lane, epoch or window), so any step can be computed without the
steps before it. A host reads only the lanes of its rows, and so opens only the files in their ranges.
"""

import math
from collections.abc import Iterator

import numpy as np

from bertjax.config import UserError
from bertjax.data import records
from bertjax.data.records import RecordSet
from bertjax.sharding.mesh import Batch

MAX_LANES = 64
SHUFFLE_WINDOW = 4096  # records of a lane that are shuffled together; a window may span two epochs


def train_batches(
    files: RecordSet,
    length: int,
    max_predictions_per_seq: int,
    *,
    batch_size: int,
    seed: int,
    start: int = 0,
    rows: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yields the batches of steps `start`, `start + 1`, ...; if `rows` (ascending) is given, only these rows.

    A batch holds the arrays of `records.features`, `[rows, ...]`, except that `next_sentence_labels` and the added
    `next_sentence_weights` (all 1) are `[rows]`. Raises `UserError` if there are fewer records than lanes.
    """
    lanes = math.gcd(batch_size, MAX_LANES)
    if files.total < lanes:
        raise UserError(
            f"{files.total} training records are too few for config.batch_size = {batch_size}: add text, increase "
            f"data.dupe_factor, or reduce the batch size"
        )
    from bertjax.data.tf import tf

    width = batch_size // lanes
    rows = np.arange(batch_size) if rows is None else rows
    own = np.unique(rows // width)
    dataset = _lanes(files, own, lanes, seed, start * width, width).batch(len(own) * width)
    if len(rows) < len(own) * width:  # other hosts use the remaining rows of a lane
        read = (own[:, None] * width + np.arange(width)).ravel()
        wanted = np.searchsorted(read, rows)
        dataset = dataset.map(lambda serialized: tf.gather(serialized, wanted))
    return _parsed(dataset, length, max_predictions_per_seq)


def _lanes(files: RecordSet, own: np.ndarray, lanes: int, seed: int, start: int, width: int):
    """Interleaves the serialized records of the lanes `own`, `width` at a time, from record `start` of each lane."""
    from bertjax.data.tf import tf

    def lane_dataset(lane):
        def spans(lane):
            return lane_spans(files, int(lane), lanes, seed, start)

        def orders(lane):
            return window_orders(files, int(lane), lanes, seed, start)

        span_type = (tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64))
        spans = tf.data.Dataset.from_generator(spans, output_signature=span_type, args=(lane,))
        orders = tf.data.Dataset.from_generator(orders, output_signature=tf.TensorSpec([None], tf.int64), args=(lane,))
        sizes = tf.constant([window_size(files, i, lanes) for i in range(lanes)], tf.int64)
        dataset = spans.flat_map(
            lambda path, first, count: tf.data.TFRecordDataset(path, buffer_size=1 << 20).skip(first).take(count)
        )
        dataset = tf.data.Dataset.zip((dataset.batch(sizes[lane]), orders)).map(tf.gather).unbatch()
        return dataset.skip(start % sizes[lane])

    own = tf.data.Dataset.from_tensor_slices(own.astype(np.int64))
    return own.interleave(lane_dataset, cycle_length=len(own), block_length=width)


def lane_range(files: RecordSet, lane: int, lanes: int) -> range:
    """Returns the indices of a lane's records in the set."""
    return range(lane * files.total // lanes, (lane + 1) * files.total // lanes)


def window_size(files: RecordSet, lane: int, lanes: int) -> int:
    return min(SHUFFLE_WINDOW, len(lane_range(files, lane, lanes)))


def lane_spans(files: RecordSet, lane: int, lanes: int, seed: int, start: int) -> Iterator[tuple[str, int, int]]:
    """Yields (path, first record, number of records) in reading order, starting with the window of record `start`."""
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
) -> Iterator[Batch]:
    """Yields batches of the first `max_sequences` records, once and in order; if `rows` is given, only these rows.

    The last batch is padded with rows of zeros, which have weight 0.
    """
    from bertjax.data.tf import tf

    dataset = tf.data.TFRecordDataset(list(files.paths)).take(max_sequences).batch(batch_size)
    for batch in _parsed(dataset, length, max_predictions_per_seq):
        missing = batch_size - len(batch["input_ids"])
        batch = {name: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()}
        yield batch if rows is None else {name: x[rows] for name, x in batch.items()}


def _parsed(dataset, length: int, max_predictions_per_seq: int) -> Iterator[Batch]:
    from bertjax.data.tf import tf

    def parse(serialized):
        batch = records.parse(serialized, length, max_predictions_per_seq)
        return {**batch, "next_sentence_weights": tf.ones_like(batch["next_sentence_labels"], tf.float32)}

    dataset = dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).prefetch(4)
    unreadable = (tf.errors.DataLossError, tf.errors.InvalidArgumentError, tf.errors.NotFoundError)
    try:
        yield from dataset.as_numpy_iterator()
    except unreadable as error:
        raise UserError(f"a record cannot be read: {error.message.split(chr(10))[0][:300]}") from None
