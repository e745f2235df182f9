"""Records in Google's format: ours read as theirs, theirs read as ours, and what does not fit is refused."""

import json
import shutil

import google_crc32c
import numpy as np
import pytest

from bertjax.config import UserError
from bertjax.data import records
from bertjax.data.batches.pipeline import heldout_batches
from bertjax.data.records import layouts, lengths
from bertjax.data.records.manifest import MANIFEST, read_manifest, write_manifest
from bertjax.data.tf import tf

# What create_pretraining_data.py writes for max_seq_length 8 and max_predictions_per_seq 2.
GOOGLE = {
    "input_ids": [101, 7592, 103, 102, 2088, 102, 0, 0],
    "input_mask": [1, 1, 1, 1, 1, 1, 0, 0],
    "segment_ids": [0, 0, 0, 0, 1, 1, 0, 0],
    "masked_lm_positions": [2, 0],
    "masked_lm_ids": [2045, 0],
    "masked_lm_weights": [1.0, 0.0],
    "next_sentence_labels": [1],
}


def google_example(values=GOOGLE) -> bytes:
    def feature(x):
        if isinstance(x[0], float):
            return tf.train.Feature(float_list=tf.train.FloatList(value=x))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=x))

    features = tf.train.Features(feature={name: feature(x) for name, x in values.items()})
    return tf.train.Example(features=features).SerializeToString()


def write_google_files(folder, files=3, rows=5):
    folder.mkdir(exist_ok=True)
    for i in range(files):
        with tf.io.TFRecordWriter(str(folder / f"tf_examples.tfrecord-{i:05d}")) as writer:
            for row in range(rows):
                writer.write(google_example({**GOOGLE, "input_ids": [101, i, row, 102, 0, 102, 0, 0]}))


def test_our_records_are_what_google_reads(tmp_path):
    block = {name: np.array([x], np.float32 if isinstance(x[0], float) else np.int64) for name, x in GOOGLE.items()}
    records.write_records(tmp_path / "a.tfrecord", [block])
    (raw,) = tf.data.TFRecordDataset(str(tmp_path / "a.tfrecord")).as_numpy_iterator()
    assert tf.train.Example.FromString(raw) == tf.train.Example.FromString(google_example())
    # run_pretraining.input_fn_builder's features.
    spec = {
        "input_ids": tf.io.FixedLenFeature([8], tf.int64),
        "input_mask": tf.io.FixedLenFeature([8], tf.int64),
        "segment_ids": tf.io.FixedLenFeature([8], tf.int64),
        "masked_lm_positions": tf.io.FixedLenFeature([2], tf.int64),
        "masked_lm_ids": tf.io.FixedLenFeature([2], tf.int64),
        "masked_lm_weights": tf.io.FixedLenFeature([2], tf.float32),
        "next_sentence_labels": tf.io.FixedLenFeature([1], tf.int64),
    }
    parsed = tf.io.parse_single_example(raw, spec)
    assert {name: x.numpy().tolist() for name, x in parsed.items()} == GOOGLE


def test_the_bytes_are_those_of_tensorflows_writer(tmp_path):
    """Numbers of one to five bytes, in messages whose lengths take one byte and more."""
    rng = np.random.default_rng(0)
    block = {
        "small": rng.integers(0, 2, (50, 3)),
        "ids": (2.0 ** rng.uniform(0, 31, (50, 200))).astype(np.int64),
        "zero": np.zeros((50, 1), np.int32),
        "weights": rng.random((50, 40), np.float32),
        "a_name_that_is_long_" + "x" * 150: rng.integers(0, 127, (50, 1)),
    }
    parts = [{name: values[rows] for name, values in block.items()} for rows in (slice(20), slice(20, None))]
    records.write_records(tmp_path / "ours", parts)
    with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as writer:
        for row in range(50):
            message = tf.train.Example()
            for name, values in block.items():
                feature = message.features.feature[name]
                numbers = feature.float_list if values.dtype == np.float32 else feature.int64_list
                numbers.value.extend(values[row].tolist())
            writer.write(message.SerializeToString(deterministic=True))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_googles_records_are_what_we_read(tmp_path):
    write_google_files(tmp_path)
    found = records.find_records(tmp_path, 8, 2, "train")
    assert found.counts == (5, 5, 5)
    assert records.find_records(tmp_path, 8, 2, "heldout") is None
    (batch,) = heldout_batches(found, 8, 2, batch_size=16, max_sequences=99)
    assert batch["input_ids"][:, 1:3].tolist()[:15] == [[i, row] for i in range(3) for row in range(5)]
    assert batch["word_weights"].dtype == np.float32 and batch["input_ids"].dtype == np.int32
    assert batch["pair_labels"].tolist() == [1] * 15 + [0]
    # The sixteenth row only fills up.
    assert batch["sequence_weights"].tolist() == [1] * 15 + [0]
    assert batch["word_weights"][15].sum() == 0


def test_others_can_hold_out_files_by_name_and_keep_lengths_apart(tmp_path):
    write_google_files(tmp_path / "length8")
    (tmp_path / "length8" / "tf_examples.tfrecord-00002").rename(tmp_path / "length8" / "heldout.tfrecord")
    assert records.find_records(tmp_path, 8, 2, "train").total == 10
    assert records.find_records(tmp_path, 8, 2, "heldout").total == 5


@pytest.mark.parametrize(
    "length, predictions, message",
    [
        (16, 2, r"length = 16, but input_ids in .*tfrecord-00000 has 8 values"),
        (8, 20, r"max_predictions_per_seq = 20, but masked_lm_positions in .* has 2 values"),
    ],
)
def test_records_of_another_shape_are_refused(tmp_path, length, predictions, message):
    write_google_files(tmp_path)
    with pytest.raises(UserError, match=message):
        records.find_records(tmp_path, length, predictions, "train")


def test_damaged_empty_and_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"data.records: no folder .*nowhere"):
        records.find_records(tmp_path / "nowhere", 8, 2, "train")
    with pytest.raises(UserError, match="no TFRecord files"):
        records.find_records(tmp_path, 8, 2, "train")
    write_google_files(tmp_path, files=1)
    path = tmp_path / "tf_examples.tfrecord-00000"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError, match=r"tfrecord-00000: damaged"):
        records.find_records(tmp_path, 8, 2, "train")
    path.write_bytes(b"this is not a TFRecord file, is it?")
    with pytest.raises(UserError, match="not a TFRecord file"):
        records.find_records(tmp_path, 8, 2, "train")
    path.write_bytes(b"")
    with pytest.raises(UserError, match="contains no records"):
        records.find_records(tmp_path, 8, 2, "train")


def test_what_is_left_of_a_broken_run_is_no_set_of_records(tmp_path, records_folder):
    shutil.copytree(records_folder / "length32", tmp_path / "length32")
    assert records.find_records(tmp_path, 32, 5, "train").total > 100
    (tmp_path / "length32" / "train-00003-of-00008.tfrecord").unlink()
    with pytest.raises(UserError, match="length32: 7 of 8 files"):
        records.find_records(tmp_path, 32, 5, "train")


def test_the_name_of_a_folder_says_nothing_about_the_number_of_files(tmp_path):
    write_google_files(tmp_path / "wiki-of-2020", files=2)
    assert records.find_records(tmp_path / "wiki-of-2020", 8, 2, "train").total == 10


@pytest.fixture
def counted(monkeypatch):
    """The names of the files whose records were counted."""
    names, count = [], records.count_records

    def count_records(path):
        names.append(path.rpartition("/")[2])
        return count(path)

    monkeypatch.setattr(records, "count_records", count_records)
    return names


def test_records_without_a_manifest_are_counted_once(tmp_path, counted):
    write_google_files(tmp_path / "records")
    (tmp_path / "records/tf_examples.tfrecord-00002").rename(tmp_path / "records/heldout.tfrecord")

    def find(split="train"):
        counted.clear()
        return records.find_records(tmp_path / "records", 8, 2, split, cache=tmp_path / "run").counts

    first, second = "tf_examples.tfrecord-00000", "tf_examples.tfrecord-00001"
    assert find() == (5, 5) and counted == [first, second]
    assert find("heldout") == (5,) and counted == ["heldout.tfrecord"]  # added to the same file
    assert find() == (5, 5) and find("heldout") == (5,) and not counted
    write_google_files(tmp_path / "other", files=1, rows=7)
    (tmp_path / "other" / first).rename(tmp_path / "records" / first)
    assert find() == (7, 5) and counted == [first]
    assert find() == (7, 5) and not counted
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["record_counts.json"]


@pytest.mark.parametrize(
    "content", ["{", "\x00\xff", "[1, 2]", '{"a": 5}', '{"a": {"bytes": 1}}', '{"a": {"bytes": [], "records": 3}}']
)
def test_a_file_of_counts_that_is_damaged_is_written_anew(tmp_path, counted, content):
    write_google_files(tmp_path / "records", files=1)
    (tmp_path / "record_counts.json").write_text(content, "latin-1")
    for _ in range(2):
        found = records.find_records(tmp_path / "records", 8, 2, "train", cache=tmp_path)
        assert found.counts == (5,) and len(counted) == 1
    (entry,) = json.loads((tmp_path / "record_counts.json").read_text()).items()
    path = tmp_path / "records/tf_examples.tfrecord-00000"
    assert entry == (str(path), {"bytes": path.stat().st_size, "records": 5})


def test_without_a_file_of_counts_none_is_written(tmp_path, counted):
    write_google_files(tmp_path)
    for times in (3, 6):
        assert records.find_records(tmp_path, 8, 2, "train").total == 15 and len(counted) == times
    assert len(list(tmp_path.iterdir())) == 3


def test_records_of_another_vocabulary_are_refused(tmp_path):
    write_google_files(tmp_path)
    with pytest.raises(UserError, match=r"vocab_size = 3: the records in .* contain token id \d+"):
        records.find_records(tmp_path, 8, 2, "train", vocab_size=3)


def test_our_own_records_are_checked_by_their_manifest(records_folder, tmp_path):
    assert records.find_records(records_folder, 32, 5, "train").total > 100
    with pytest.raises(UserError, match="have length 32, 64, not 128"):
        records.find_records(records_folder, 128, 20, "train")
    with pytest.raises(UserError, match=r"max_predictions_per_seq = 7, but .* with 5"):
        records.find_records(records_folder, 32, 7, "train")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest.json: damaged, .*prepare the records again"):
        records.find_records(tmp_path, 32, 5, "train")
    (tmp_path / "manifest.json").write_text(json.dumps(read_manifest(records_folder)))
    with pytest.raises(UserError, match=r"train-00000.*: missing, but listed"):
        records.find_records(tmp_path, 32, 5, "train")


@pytest.fixture
def copied(records_folder, tmp_path):
    return shutil.copytree(records_folder, tmp_path / "copied")


def test_the_manifest_has_size_and_checksum_of_each_file(records_folder):
    for found in read_manifest(records_folder)["sets"].values():
        for path, entry in [*found["train"].items(), *found["heldout"].items()]:
            content = (records_folder / path).read_bytes()
            assert entry == {
                "records": records.count_records(str(records_folder / path)),
                "bytes": len(content),
                "crc32c": google_crc32c.value(content),
                "head_crc32c": google_crc32c.value(content[:4096]),
                "lengths_crc32c": google_crc32c.value(lengths.path_of(records_folder / path).read_bytes()),
            }


def swap(one, other):
    one.rename(kept := one.with_name("kept"))
    other.rename(one)
    kept.rename(other)


SIZE, CONTENT = r"has [\d,]+ bytes, not [\d,]+ as the manifest says", "is another file than the manifest says"
CHANGES = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-5]), SIZE),
    "empty": (lambda path: path.write_bytes(b""), SIZE),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"0"), SIZE),
    "overwritten": (lambda path: path.write_bytes(bytes(path.stat().st_size)), CONTENT),
}


@pytest.mark.parametrize("name", ["train-00003-of-00008", "heldout-00000-of-00001"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_not_what_the_manifest_says_is_named(copied, name, change):
    make, message = CHANGES[change]
    make(path := copied / f"length64/{name}.tfrecord")
    split, _, _ = name.partition("-")
    with pytest.raises(UserError, match=rf"{path}: {message}.*; copy or prepare it again"):
        records.find_records(copied, 64, 10, split)
    assert records.find_records(copied, 32, 5, split).total


def test_swapped_files_are_named_even_if_they_have_the_same_size(tmp_path):
    entries = {}
    for i in range(2):
        block = {name: np.full((9, size), i, dtype) for name, (size, dtype) in layouts.features(8, 2).items()}
        entries[f"{i}.tfrecord"] = records.write_records(tmp_path / f"{i}.tfrecord", [block])
    assert len({entry["bytes"] for entry in entries.values()}) == 1
    sets = {"8": {"max_predictions_per_seq": 2, "train": entries, "heldout": {}}}
    made_with = {"kind": "wordpiece", "lowercase": True, "vocab_size": 9, "fingerprint": ""}
    write_manifest(tmp_path, {"sets": sets, "recipe": {}, "tokenizer": made_with})
    assert records.find_records(tmp_path, 8, 2, "train").counts == (9, 9)
    swap(tmp_path / "0.tfrecord", tmp_path / "1.tfrecord")
    for on_corrupt in ("stop", "skip"):  # nothing is left to train on
        with pytest.raises(UserError, match=r"0.tfrecord: is another file.*\(and 1 more"):
            records.find_records(tmp_path, 8, 2, "train", on_corrupt=on_corrupt)


def test_files_that_are_not_what_the_manifest_says_can_be_left_out(copied, capfd):
    files = [copied / f"length64/train-0000{i}-of-00008.tfrecord" for i in (2, 5, 6)]
    swap(*files[:2])
    files[2].write_bytes(files[2].read_bytes()[:-5])
    whole = records.find_records(copied, 64, 10, "heldout")
    found = records.find_records(copied, 64, 10, "train", on_corrupt="skip")
    assert whole.lost == {} and found.lost == {str(p): (range(found.counts[i]),) for i, p in zip((2, 5, 6), files)}
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 3 and all(str(p) in line and "; skipping its" in line for p, line in zip(files, lines))
    batches = heldout_batches(found, 64, 10, batch_size=found.total, max_sequences=found.total)
    is_lost = np.repeat([i in (2, 5, 6) for i in range(8)], found.counts)
    assert ((next(batches)["sequence_weights"] == 0) == is_lost).all()


def test_manifests_of_older_versions_are_read(copied):
    manifest = read_manifest(copied)
    for found in manifest["sets"].values():
        for split in ("train", "heldout"):
            found[split] = {path: entry["records"] for path, entry in found[split].items()}
    manifest["recipe"].pop("masking"), manifest.pop("layout")
    before = records.find_records(copied, 64, 10, "train")
    write_manifest(copied, manifest)
    assert records.find_records(copied, 64, 10, "train") == before


@pytest.mark.parametrize("measures", [False, True])
def test_a_manifest_cannot_have_more_records_than_its_files_have_room_for(copied, measures):
    manifest = read_manifest(copied)
    files = manifest["sets"]["64"]["train"]
    files[next(iter(files))] = 2**31
    write_manifest(copied, manifest)
    with pytest.raises(
        UserError, match=r"train-00000-of-.*: cannot have 2,147,483,648 records, as the manifest says, in"
    ):
        records.find_records(copied, 64, 10, "train", measures=measures)


def test_predictions_a_row_are_free_where_records_are_not_masked(copied):
    manifest = read_manifest(copied)
    manifest["recipe"]["masking"], manifest["layout"] = "dynamic", "compact"
    write_manifest(copied, manifest)
    found = records.find_records(copied, 64, 7, "train")
    assert (found.masking, found.layout, found.vocab_size) == ("dynamic", "compact", 150)


def test_lengths_of_records_without_a_manifest_are_measured_once(tmp_path, monkeypatch):
    (tmp_path / "records").mkdir()
    sizes = [[3, 8, 5], [6, 4]]
    for i, some in enumerate(sizes):
        with tf.io.TFRecordWriter(str(tmp_path / f"records/tf_examples.tfrecord-{i:05d}")) as writer:
            for size in some:
                writer.write(google_example({**GOOGLE, "input_mask": [1] * size + [0] * (8 - size)}))
    measured, measure = [], lengths._measure

    def spy(path, *arguments):
        measured.append(path)
        return measure(path, *arguments)

    monkeypatch.setattr(lengths, "_measure", spy)
    for times in (2, 2):
        found = records.find_records(tmp_path / "records", 8, 2, "train", cache=tmp_path / "run", measures=True)
        assert found.lengths.tolist() == [3, 8, 5, 6, 4] and len(measured) == times
    assert records.find_records(tmp_path / "records", 8, 2, "train").lengths is None


def test_a_damaged_record_hides_no_other_length(tmp_path):
    (tmp_path / "records").mkdir()
    path, sizes = tmp_path / "records/tf_examples.tfrecord", [3, 8, 5, 6, 4]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for size in sizes:
            writer.write(google_example({**GOOGLE, "input_mask": [1] * size + [0] * (8 - size)}))
        writer.write(google_example({**GOOGLE, "input_mask": [1, 0]}))  # of another length
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 6 + 40] ^= 1  # of the second
    path.write_bytes(damaged)
    given = ((str(path),), (6,), layouts.Format(8, 2), tmp_path / "lengths")
    assert lengths.measure(*given).tolist() == [3, 1, 5, 6, 4, 1]
    path.write_bytes(whole)  # what could not be read is not remembered
    assert lengths.measure(*given).tolist() == [3, 8, 5, 6, 4, 1]


@pytest.mark.parametrize("damage, message", [("delete", "cannot be read"), ("cut", "is not what the manifest says")])
def test_lengths_that_are_missing_or_damaged_are_named(records_folder, tmp_path, damage, message):
    folder = shutil.copytree(records_folder, tmp_path / "records")
    path = next((folder / "length32").glob("train-*.lengths"))
    path.unlink() if damage == "delete" else path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=rf"{path.name}: {message}"):
        records.find_records(folder, 32, 5, "train")


def test_lengths_are_those_of_the_records(records_folder):
    for length, predictions in ((32, 5), (64, 10)):
        found = records.find_records(records_folder, length, predictions, "train")
        form = layouts.Format(length, predictions)
        np.testing.assert_array_equal(found.lengths, lengths.measure(found.paths, found.counts, form, None))


def test_a_manifest_that_counts_other_records_than_there_are_is_refused(copied):
    """A reader that believed it would look for them for ever."""
    path = copied / MANIFEST
    manifest = json.loads(path.read_text())
    next(iter(manifest["sets"]["64"]["train"].values()))["records"] += 1000
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"train-00000-of-00008.lengths: is not what the manifest says"):
        records.find_records(copied, 64, 10, "train")
