"""The reader with tf.data; see the package for what its functions do."""

import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.order import Order
from bertjax.data.loading.readers.interface import PREFETCH, READ_BUFFER, Part, UnreadableRecord, ranges, readable
from bertjax.data.records import layouts
from bertjax.data.records.layouts import ARRAY_OF_FEATURE, Format
from bertjax.data.tensorflow import elements, tf
from bertjax.distributed.topology import available_cores

_UNREADABLE = (
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,  # too few records
    tf.errors.InvalidArgumentError,  # not of this layout
    tf.errors.NotFoundError,
)

# Nothing here is control flow of tensors, for which TensorFlow would rewrite each function: a second at every start.
_as_it_is = tf.autograph.experimental.do_not_convert


@_as_it_is
def grouped(order: Order, form: Format, rows: np.ndarray, groups: np.ndarray, step: int, lost):
    size = order.group_size
    wanted = np.searchsorted(groups, rows // size) * size + rows % size  # other hosts use other rows of a group
    is_all = len(rows) == len(groups) * size
    together = len(order.lanes_of(0))

    def parts(lane):
        for span in order.spans(int(lane), step):
            yield from readable(span, lost)

    def orders(group):
        window, offset = divmod(step, order.steps)
        while True:
            yield order.arrangement(int(group), window).order[offset:].ravel()
            window, offset = window + 1, 0

    def lane_windows(lane):
        return _read(parts, form, lane).batch(order.window)

    def group_records(group):
        lanes = tf.data.Dataset.range(group, order.lanes, order.groups)
        windows = lanes.interleave(lane_windows, cycle_length=together)  # not in parallel: it would read windows ahead
        windows = windows.batch(together).map(lambda lanes: tf.reshape(lanes, [-1]))
        places = tf.data.Dataset.from_generator(orders, output_signature=tf.TensorSpec([None], tf.int64), args=(group,))
        return tf.data.Dataset.zip((windows, places)).map(tf.gather).rebatch(size)

    found = tf.data.Dataset.from_tensor_slices(groups.astype(np.int64))
    parallel = min(len(groups), available_cores())
    found = found.interleave(group_records, cycle_length=len(groups), num_parallel_calls=parallel)
    found = found.batch(len(groups), drop_remainder=True).map(lambda groups: tf.reshape(groups, [-1]))
    return found if is_all else found.map(lambda records: tf.gather(records, wanted))


@_as_it_is
def in_order(parts: Sequence[Part], form: Format, most: int, step: int, batch_size: int):
    return _read(lambda: iter(parts), form).take(most).skip(step * batch_size).batch(batch_size)


@_as_it_is
def side_by_side(parts: Sequence[Part], form: Format, total: int, rows: int, step: int):
    own = functools.partial(_read, lambda row: ranges(parts, total, rows, row), form)
    return tf.data.Dataset.range(rows).interleave(own, cycle_length=rows).batch(rows).skip(step)


def batches(source, form: Format) -> Iterator[Batch]:
    parsed = source.map(functools.partial(_parse, form=form), num_parallel_calls=available_cores())
    try:
        yield from elements(parsed.prefetch(PREFETCH))
    except _UNREADABLE as error:
        raise UnreadableRecord(error.message.splitlines()[0][:300]) from None


def _read(parts: Callable[..., Iterator[Part]], form: Format, *arguments):
    """A dataset of the serialized records of `parts(*arguments)`."""
    number = tf.TensorSpec([], tf.int64)
    found = tf.data.Dataset.from_generator(
        parts, output_signature=(tf.TensorSpec([], tf.string), number, number, number), args=arguments
    )

    def read(path, first, count, missing):
        found = tf.data.TFRecordDataset(path, buffer_size=READ_BUFFER).skip(first).take(count)
        found = found.apply(tf.data.experimental.assert_cardinality(count))  # a shorter file would shift all rows
        return found.concatenate(tf.data.Dataset.from_tensors(tf.constant(layouts.empty_record(form))).repeat(missing))

    return found.flat_map(read)


@_as_it_is
def _parse(serialized, form: Format):
    """As `layouts.parse`, inside tf.data."""
    found = (_parse_compact if form.layout == "compact" else _parse_google)(serialized, form)
    batch = {ARRAY_OF_FEATURE[name]: values for name, values in found.items()}
    return {**batch, "sequence_weights": tf.cast(batch["segments"][:, 0], tf.float32)}


def _parse_google(serialized, form: Format):
    sizes = layouts.features(form.length, form.max_predictions_per_seq, form.masking)
    spec = {name: tf.io.FixedLenFeature([size], tf.as_dtype(dtype)) for name, (size, dtype) in sizes.items()}
    batch = tf.io.parse_example(serialized, spec)
    batch = {name: tf.cast(x, tf.int32) if x.dtype == tf.int64 else x for name, x in batch.items()}
    batch["next_sentence_labels"] = batch["next_sentence_labels"][:, 0]
    return batch


def _parse_compact(serialized, form: Format):
    number = layouts.number_of(form)
    names = ["ids", "first_size", "label"] + (["positions", "labels"] if form.masking == "static" else [])
    found = tf.io.parse_example(serialized, {name: tf.io.FixedLenFeature([], tf.string) for name in names})

    def padded(name, size):
        dtype = tf.as_dtype(number.newbyteorder("="))
        return tf.cast(tf.io.decode_raw(found[name], dtype, fixed_length=size * number.itemsize), tf.int32)

    def sizes(name):
        return tf.strings.length(found[name])[:, None] // number.itemsize

    place = tf.range(form.length)
    inside = place < sizes("ids")
    batch = {
        "input_ids": padded("ids", form.length),
        "input_mask": tf.cast(inside, tf.int32),
        "segment_ids": tf.where(inside, _types(padded("first_size", 2), sizes("first_size"), place), 0),
        "next_sentence_labels": padded("label", 1)[:, 0],
    }
    if form.masking == "static":
        used = tf.range(form.max_predictions_per_seq) < sizes("labels")
        batch |= {
            "masked_lm_positions": padded("positions", form.max_predictions_per_seq),
            "masked_lm_ids": padded("labels", form.max_predictions_per_seq),
            "masked_lm_weights": tf.cast(used, tf.float32),
        }
    return batch


def _types(ends, count, place):
    """Returns the token types of places `[length]`, which change at `count` `[batch, 1]` of the ends `[batch, 2]`."""
    is_past = (place >= ends[..., None]) & (tf.range(2)[:, None] < count[..., None])
    return tf.reduce_sum(tf.cast(is_past, tf.int32), 1)
