"""The reader without TensorFlow compared with the tf.data reader; tests/data/test_pipeline.py uses both."""

import dataclasses
import itertools

import numpy as np
import pytest

from bertjax.data.batch import RowSize, record_arrays
from bertjax.data.loading import order
from bertjax.data.loading.order import Order
from bertjax.data.loading.readers import interface, plain
from bertjax.data.records import layouts
from bertjax.data.records.parsing import InvalidRecord, Records
from bertjax.data.records.serialization import DamagedRecord, RecordOffsets, read_range
from tests.data.test_pipeline import LENGTH, PREDICTIONS, assert_same, random_rows, write_set


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size, is_masked", [(65_536, False), (100, True), (1 << 21, True)])
def test_both_readers_and_both_layouts_give_the_same_batches(tmp_path, monkeypatch, vocab_size, is_masked):
    """All integer widths and layouts give identical batches; some rows are empty."""
    monkeypatch.setattr(order, "MAX_LANES", 4)
    monkeypatch.setattr(order, "SEQUENCES_PER_GROUP", 8)
    rows, places = random_rows(200, vocab_size, is_masked), np.arange(5, 16)

    def batches(reader, layout):
        files = write_set(tmp_path / f"{reader.__name__}-{layout}", rows, layout, vocab_size=vocab_size)
        form = layouts.Format(LENGTH, PREDICTIONS, layout, files.masking, vocab_size)
        parts, lost = [(path, 2, 50, 3) for path in files.paths], {files.paths[1]: (range(3, 9),)}
        measured = dataclasses.replace(files, lengths=rows["size"].astype(np.uint16))
        shuffled, packed = (Order(record_set, 16, 0, RowSize(LENGTH, 8)) for record_set in (files, measured))
        for source in (
            reader.training_source(shuffled, form, places, shuffled.groups_of(places, 16), 7, lost),
            reader.training_source(packed, form, places, packed.groups_of(places, 16), 7, lost),
            reader.heldout_source(parts, form, 150, 2, 16),
            reader.heldout_stream_source(parts, form, 100, 8, 1),
        ):
            yield from itertools.islice(reader.batches(source, form), 15)

    tf_data, expected = interface.reader(), list(batches(plain, "google"))
    for reader, layout in ((plain, "compact"), (tf_data, "google"), (tf_data, "compact")):
        assert_same(list(batches(reader, layout)), expected)
    assert set(expected[0]) == set(record_arrays("static" if is_masked else "dynamic"))
    ids = np.concatenate([batch["input_ids"] for batch in expected]).tolist()
    assert len(ids) > 300 and set(map(tuple, ids)) <= {*map(tuple, rows["ids"].tolist()), (0,) * LENGTH}


def test_examples_are_parsed_with_features_in_any_order_and_extra_features():
    from bertjax.data.tensorflow import tf

    def example(ids, *names):
        values = {"input_ids": ids, "input_mask": [1] * 4, "segment_ids": [0] * 4, "next_sentence_labels": [1]}
        entries = b""
        for name in names or values:
            features = tf.train.Features()
            features.feature[name].int64_list.value.extend(values.get(name, []))
            if name not in values:
                features.feature[name].bytes_list.value.extend([b"a", b"bc"])
            entries += features.SerializeToString()
        return b"\n" + bytes([len(entries) & 0x7F | 0x80, len(entries) >> 7]) + entries

    names = ["next_sentence_labels", "segment_ids", "input_mask", "input_ids"]
    ids = [[1, 2, 300, 70_000], [5, 0, 0, 0], [9, 1 << 30, 3, 1], [-1, 2, 3, 4]]
    records = [example(ids[0]), example(ids[1], "of_others" * 20, *names), example(ids[2]), example(ids[3], *names)]
    form = layouts.Format(4, 1, masking="dynamic")
    parsed = layouts.parse_records(records, form)
    assert parsed["input_ids"].tolist() == ids and parsed["input_ids"].dtype == np.int32
    assert parsed["pair_labels"].tolist() == [1] * 4
    for torn, length in ((records, 5), ([*records, b"no example"], 4)):
        with pytest.raises(InvalidRecord):
            layouts.parse_records(torn, layouts.Format(length, 1, masking="dynamic"))


@pytest.mark.parametrize("buffer", [1, 13, 900, 1 << 20])
def test_any_range_is_read_with_any_buffer(tmp_path, buffer):
    """Records of 0 to 3,000 bytes.

    Damage before a range is not read; with damage inside a range, earlier records are read.
    """
    from bertjax.data.tensorflow import tf

    path, rng = tmp_path / "a.tfrecord", np.random.default_rng(0)
    written = [rng.bytes(size) for size in (0, 1, 2999, *rng.integers(0, 40, 590))]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in written:
            writer.write(record)
    places = RecordOffsets()
    for first, count in ((0, None), (0, 593), (3, 256), (2, 1), (255, 2), (512, 81), (592, 1), (593, 0)):
        last = None if count is None else first + count
        assert list(read_range(str(path), first, count, buffer, places)) == written[first:last]
    with pytest.raises(DamagedRecord, match=r"^record 593 is damaged or missing$"):
        list(read_range(str(path), 580, 20, buffer, places))

    content, start = path.read_bytes(), sum(len(record) + 16 for record in written[:300])
    for place in (start + 1, start + 6, start + 12):  # in the length of the record, and in the record
        torn, taken = bytearray(content), []
        torn[place] ^= 0x55
        path.write_bytes(torn)
        with pytest.raises(DamagedRecord, match=r"^record 300 is damaged or missing$"):
            taken.extend(read_range(str(path), 290, 20, buffer))
        assert taken == written[290:300]
    assert list(read_range(str(path), 301, 20, buffer)) == written[301:321]


def test_truncated_examples_are_refused_without_reading_out_of_bounds():
    (record,) = [layouts.empty_record(layouts.Format(LENGTH, PREDICTIONS))]
    form, rng = layouts.Format(LENGTH, PREDICTIONS), np.random.default_rng(0)
    layouts.parse_records([record, record], form)
    for end in range(0, len(record), 7):
        with pytest.raises(InvalidRecord):
            layouts.parse_records([record[:end]], form)
    for _ in range(300):  # each example is refused, or has the right sizes
        torn = bytearray(record)
        torn[rng.integers(len(torn))] = rng.integers(256)
        try:
            assert layouts.parse_records([record, bytes(torn)], form)["input_ids"].shape == (2, LENGTH)
        except InvalidRecord:
            pass
    assert Records([record]).count("input_ids") == LENGTH


def test_the_plain_reader_is_used_without_tensorflow(monkeypatch):
    assert interface.reader().__name__.endswith(".tf_data")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert interface.reader() is plain
