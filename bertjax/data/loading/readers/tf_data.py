"""The reader with tf.data; `interface.Reader` describes the functions."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.order import Order
from bertjax.data.loading.readers.interface import (
    PREFETCH,
    READ_BUFFER,
    Part,
    SkippedRecords,
    UnreadableRecord,
    parts_of_row,
    split_span,
)
from bertjax.data.records import layouts
from bertjax.data.records.layouts import ARRAY_OF_FEATURE, Format
from bertjax.data.tensorflow import tf, untuned
from bertjax.distributed.topology import available_cores

_UNREADABLE = (
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,  # a file has fewer records than expected
    tf.errors.InvalidArgumentError,  # a record has another layout
    tf.errors.NotFoundError,
)

# Prevents AutoGraph from converting functions, which takes a second and is unnecessary without Python control flow.
_no_autograph = tf.autograph.experimental.do_not_convert


@_no_autograph
def training_source(
    order: Order, form: Format, rows: np.ndarray, groups: np.ndarray, step: int, skipped: SkippedRecords
) -> Any:
    """Returns a dataset of the records of each step, see `Reader.training_source`."""
    size = order.group_size
    indices = (
        np.searchsorted(groups, rows // size) * size + rows % size
    )  # a host may read some sequences of a group only
    is_all = len(rows) == len(groups) * size
    lanes_per_group = len(order.lanes_of(0))

    def parts(lane: Any) -> Iterator[Part]:
        for span in order.spans(int(lane), step):
            yield from split_span(span, skipped)

    def orders(group: Any) -> Iterator[np.ndarray]:
        window, offset = divmod(step, order.steps)
        while True:
            yield order.arrangement(int(group), window).order[offset:].ravel()
            window, offset = window + 1, 0

    def lane_windows(lane: Any) -> Any:
        return _read(parts, form, lane).batch(order.window)

    def group_records(group: Any) -> Any:
        lanes = tf.data.Dataset.range(group, order.lanes, order.groups)
        windows = lanes.interleave(
            lane_windows, cycle_length=lanes_per_group
        )  # sequential: parallel calls would read windows in advance
        windows = windows.batch(lanes_per_group).map(lambda lanes: tf.reshape(lanes, [-1]))
        places = tf.data.Dataset.from_generator(orders, output_signature=tf.TensorSpec([None], tf.int64), args=(group,))
        return tf.data.Dataset.zip((windows, places)).map(tf.gather).rebatch(size)

    dataset = tf.data.Dataset.from_tensor_slices(groups.astype(np.int64))
    parallel = min(len(groups), available_cores())
    dataset = dataset.interleave(group_records, cycle_length=len(groups), num_parallel_calls=parallel)
    dataset = dataset.batch(len(groups), drop_remainder=True).map(lambda groups: tf.reshape(groups, [-1]))
    return dataset if is_all else dataset.map(lambda records: tf.gather(records, indices))


@_no_autograph
def heldout_source(parts: Sequence[Part], form: Format, most: int, step: int, batch_size: int) -> Any:
    """Returns a dataset of the records of each step, see `Reader.heldout_source`."""
    return _read(lambda: iter(parts), form).take(most).skip(step * batch_size).batch(batch_size)


@_no_autograph
def heldout_stream_source(parts: Sequence[Part], form: Format, total: int, rows: int, step: int) -> Any:
    """Returns a dataset of the records of each step, see `Reader.heldout_stream_source`."""
    records_of_row = functools.partial(_read, lambda row: parts_of_row(parts, total, rows, row), form)
    return tf.data.Dataset.range(rows).interleave(records_of_row, cycle_length=rows).batch(rows).skip(step)


def batches(source: Any, form: Format) -> Iterator[Batch]:
    """Yields the parsed batches of a source, see `Reader.batches`."""
    parsed = source.map(functools.partial(_parse, form=form), num_parallel_calls=available_cores())
    try:
        yield from untuned(parsed.prefetch(PREFETCH)).as_numpy_iterator()
    except _UNREADABLE as error:
        raise UnreadableRecord(error.message.splitlines()[0][:300]) from None


def _read(parts: Callable[..., Iterator[Part]], form: Format, *arguments: Any) -> Any:
    """Returns a dataset of the serialized records of `parts(*arguments)`."""
    number = tf.TensorSpec([], tf.int64)
    dataset = tf.data.Dataset.from_generator(
        parts, output_signature=(tf.TensorSpec([], tf.string), number, number, number), args=arguments
    )

    def read(path: Any, first: Any, count: Any, missing: Any) -> Any:
        records = tf.data.TFRecordDataset(path, buffer_size=READ_BUFFER).skip(first).take(count)
        records = records.apply(
            tf.data.experimental.assert_cardinality(count)
        )  # without this check, later rows of a shorter file would contain the wrong records
        empty = tf.data.Dataset.from_tensors(tf.constant(layouts.empty_record(form)))
        return records.concatenate(empty.repeat(missing))

    return dataset.flat_map(read)


@_no_autograph
def _parse(serialized: Any, form: Format) -> dict[str, Any]:
    """Parses serialized records `[rows]` to a batch of tensors. The values equal `layouts.parse_records`."""
    features = (_parse_compact if form.layout == "compact" else _parse_google)(serialized, form)
    batch = {ARRAY_OF_FEATURE[name]: values for name, values in features.items()}
    return {**batch, "sequence_weights": tf.cast(batch["segments"][:, 0], tf.float32)}


def _parse_google(serialized: Any, form: Format) -> dict[str, Any]:
    sizes = layouts.features(form.length, form.max_predictions_per_seq, form.masking)
    spec = {name: tf.io.FixedLenFeature([size], tf.as_dtype(dtype)) for name, (size, dtype) in sizes.items()}
    batch = tf.io.parse_example(serialized, spec)
    batch = {name: tf.cast(x, tf.int32) if x.dtype == tf.int64 else x for name, x in batch.items()}
    batch["next_sentence_labels"] = batch["next_sentence_labels"][:, 0]
    return batch


def _parse_compact(serialized: Any, form: Format) -> dict[str, Any]:
    dtype, sizes = layouts.compact_dtype(form), layouts.compact_sizes(form)
    features = tf.io.parse_example(serialized, {name: tf.io.FixedLenFeature([], tf.string) for name in sizes})
    compact = {}
    for name, most in sizes.items():
        number = tf.as_dtype(dtype.newbyteorder("="))
        values = tf.io.decode_raw(features[name], number, fixed_length=most * dtype.itemsize)
        compact[name] = tf.cast(values, tf.int32), tf.strings.length(features[name]) // dtype.itemsize
    return layouts.google_features(compact, form, tf.where)
