"""The reader without TensorFlow beside that with tf.data; tests/data/test_pipeline.py is run with both."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from bertjax.data.batches.order import Order
from bertjax.data.batches.packing import RowSize
from bertjax.data.batches.readers import UnreadableRecord, plain, tf_data
from bertjax.data.records import layouts
from bertjax.data.records.parsing import Records, Unfit
from bertjax.data.records.serialization import Damaged, Places, read_range
from bertjax.data.tf import tf
from tests.data.test_pipeline import LENGTH, PREDICTIONS, assert_same, random_rows, write_set


@pytest.mark.slow
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("vocab_size", [100, 30_522, 1 << 21])
@pytest.mark.parametrize("layout", ["google", "compact"])
def test_both_readers_make_the_same_batches(tmp_path, layout, vocab_size, is_masked):
    """In every layout, width of numbers and way of reading, bit for bit; some rows are empty."""
    files = write_set(tmp_path / "records", random_rows(200, vocab_size, is_masked), layout, vocab_size=vocab_size)
    form = layouts.Format(LENGTH, PREDICTIONS, layout, files.masking, vocab_size)
    order, rows = Order(files, 16, 0, RowSize(LENGTH, 8)), np.arange(5, 16)
    parts = [(path, 2, 50, 3) for path in files.paths]

    def sources(reader):
        lost = {files.paths[1]: (range(3, 9),)}
        yield reader.grouped(order, form, rows, rows, 7, lost)
        yield reader.in_order(parts, form, 150, 2, 16)
        yield reader.side_by_side(parts, form, 100, 8, 1)

    def taken(reader):
        return [list(itertools.islice(reader.batches(source, form), 20)) for source in sources(reader)]

    for ours, theirs in zip(taken(plain), taken(tf_data), strict=True):
        assert_same(ours, theirs)


def test_examples_are_parsed_in_any_order_of_features_and_with_others():
    def example(ids, reverse: bool, extra: bool = False):
        values = {"input_ids": ids, "input_mask": [1] * 4, "segment_ids": [0] * 4, "next_sentence_labels": [1]}
        found = {name: tf.train.Feature(int64_list=tf.train.Int64List(value=x)) for name, x in values.items()}
        if extra:
            found["of_others" * 20] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"a", b"bc"]))
            found["of_none"] = tf.train.Feature(float_list=tf.train.FloatList(value=[]))
        parts = [
            tf.train.Example(features=tf.train.Features(feature={name: found[name]})).SerializeToString()
            for name in sorted(found, reverse=reverse)
        ]
        entries = b"".join(tf.train.Example.FromString(part).features.SerializeToString() for part in parts)
        return b"\n" + bytes([len(entries) & 0x7F | 0x80, len(entries) >> 7]) + entries

    ids = [[1, 2, 300, 70_000], [5, 0, 0, 0], [9, 1 << 30, 3, 1], [-1, 2, 3, 4]]
    records = [example(ids[0], False), example(ids[1], True, True), example(ids[2], False), example(ids[3], True)]
    form = layouts.Format(4, 1, masking="dynamic")
    found = layouts.parse(records, form)
    assert found["input_ids"].tolist() == ids and found["input_ids"].dtype == np.int32
    assert found["pair_labels"].tolist() == [1] * 4
    with pytest.raises(Unfit):
        layouts.parse(records, layouts.Format(5, 1, masking="dynamic"))
    with pytest.raises(Unfit):
        layouts.parse([*records, b"no example"], form)


def test_what_comes_before_a_damaged_record_is_handed_on_first(tmp_path):
    """As many whole steps as with tf.data, though several are parsed together."""
    (path,) = write_set(tmp_path / "records", random_rows(40), files=1).paths
    content = bytearray(open(path, "rb").read())
    content[len(content) * 5 // 8] ^= 1  # in the 25th record, or one beside it
    open(path, "wb").write(content)
    form = layouts.Format(LENGTH, PREDICTIONS, vocab_size=1000)
    counts = []
    for reader in (tf_data, plain):
        taken, batches = 0, reader.batches(reader.in_order([(path, 0, 40, 0)], form, 40, 0, 4), form)
        with pytest.raises(UnreadableRecord):
            for _ in batches:
                taken += 1
        counts.append(taken)
    assert counts[1] >= 5 and counts[0] <= counts[1]  # what tf.data has read ahead, it drops


@pytest.mark.parametrize("buffer", [1, 13, 900, 1 << 20])
def test_any_range_is_read_with_any_buffer(tmp_path, buffer):
    """Records of 0 to 3,000 bytes. What is damaged before a range is not asked for; in it, those before are given."""
    path, rng = tmp_path / "a.tfrecord", np.random.default_rng(0)
    written = [rng.bytes(size) for size in (0, 1, 2999, *rng.integers(0, 40, 590))]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in written:
            writer.write(record)
    places = Places()
    for first, count in ((0, None), (0, 593), (3, 256), (2, 1), (255, 2), (512, 81), (592, 1), (593, 0)):
        last = None if count is None else first + count
        assert list(read_range(str(path), first, count, buffer, places)) == written[first:last]
    with pytest.raises(Damaged, match=r"^record 593 is damaged or missing$"):
        list(read_range(str(path), 580, 20, buffer, places))

    content = bytearray(path.read_bytes())
    starts = np.cumsum([0, *(len(record) + 16 for record in written)])
    for place in (starts[300] + 12, starts[300] + 1, starts[300] + 6):  # in the record, and in its length
        torn = content.copy()
        torn[place] ^= 0x55
        path.write_bytes(torn)
        taken = []
        with pytest.raises(Damaged, match=r"^record 300 is damaged or missing$"):
            for record in read_range(str(path), 290, 20, buffer):
                taken.append(record)
        assert taken == written[290:300]
        if place == starts[300] + 12:
            assert list(read_range(str(path), 301, 20, buffer)) == written[301:321]


def test_torn_examples_are_refused_and_never_read_beyond():
    (record,) = [layouts.empty_record(layouts.Format(LENGTH, PREDICTIONS))]
    form, rng = layouts.Format(LENGTH, PREDICTIONS), np.random.default_rng(0)
    layouts.parse([record, record], form)
    for end in range(0, len(record), 7):
        with pytest.raises(Unfit):
            layouts.parse([record[:end]], form)
    for _ in range(300):  # each is refused, or has the right sizes
        torn = bytearray(record)
        torn[rng.integers(len(torn))] = rng.integers(256)
        try:
            assert layouts.parse([record, bytes(torn)], form)["input_ids"].shape == (2, LENGTH)
        except Unfit:
            pass
    assert Records([record]).count("input_ids") == LENGTH


@pytest.mark.slow
def test_records_are_read_where_tensorflow_is_not_installed(tmp_path):
    files = write_set(tmp_path / "records", random_rows(64))
    script = f"""
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow":
            raise ModuleNotFoundError(name)

import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "tensorflow" else find(name, *rest)
sys.meta_path.insert(0, Missing())
from bertjax.data import records
from bertjax.data.batches import pipeline
from bertjax.data.batches.order import Order
from bertjax.data.batches.packing import RowSize
found = records.find_records({str(tmp_path / "records")!r}, {LENGTH}, {PREDICTIONS}, "train", 1000, measures=True)
batches = pipeline.packed_batches(Order(found, 16, 0, RowSize({LENGTH}, 8, 100)), {PREDICTIONS}, multiple=1)
print(found.total, next(batches)["input_ids"].shape[1], len(found.lengths))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == [str(files.total), str(LENGTH), str(files.total)], done.stderr
