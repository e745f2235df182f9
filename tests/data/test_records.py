"""Records in Google's format: both directions of compatibility, and refused mismatches."""

import json
import shutil

import google_crc32c
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.data.records import layouts, lengths, record_sets
from bertjax.data.records.manifest import read_manifest, write_manifest
from tests.conftest import heldout_batches

# The features that create_pretraining_data.py writes for max_seq_length 8 and max_predictions_per_seq 2.
GOOGLE = {
    "input_ids": [101, 7592, 103, 102, 2088, 102, 0, 0],
    "input_mask": [1, 1, 1, 1, 1, 1, 0, 0],
    "segment_ids": [0, 0, 0, 0, 1, 1, 0, 0],
    "masked_lm_positions": [2, 0],
    "masked_lm_ids": [2045, 0],
    "masked_lm_weights": [1.0, 0.0],
    "next_sentence_labels": [1],
}
FIRST, SECOND, THIRD = (f"tf_examples.tfrecord-{i:05d}" for i in range(3))


def google_block(count, **features):
    """Returns `count` records of `GOOGLE` with changed features."""
    types = {name: np.float32 if name == "masked_lm_weights" else np.int64 for name in GOOGLE}
    return {name: np.tile(np.array(x, types[name]), (count, 1)) for name, x in GOOGLE.items()} | features


def write_google_files(folder, files=3, rows=5):
    """Writes files in which input_ids has the number of the file, and the number of the row."""
    folder.mkdir(exist_ok=True)
    for i, name in enumerate((FIRST, SECOND, THIRD)[:files]):
        block = google_block(rows)
        block["input_ids"][:, 1], block["input_ids"][:, 2] = i, np.arange(rows)
        record_sets.write_records(folder / name, [block])


def write_sizes(path, sizes):
    """Writes records of these numbers of tokens."""
    mask = (np.arange(8) < np.array(sizes)[:, None]).astype(int)
    record_sets.write_records(path, [google_block(len(sizes), input_mask=mask)])


def find(folder, length=8, predictions=2, split="train", **options):
    return record_sets.find_records(folder, length, predictions, split, **options)


def test_records_of_google_are_read(tmp_path):
    write_google_files(tmp_path)
    record_set = find(tmp_path)
    assert record_set.counts == (5, 5, 5)
    assert find(tmp_path, split="heldout") is None
    (batch,) = heldout_batches(record_set, 8, 2, batch_size=16, max_sequences=99)
    assert batch["input_ids"][:, 1:3].tolist()[:15] == [[i, row] for i in range(3) for row in range(5)]
    assert batch["word_weights"].dtype == np.float32 and batch["input_ids"].dtype == np.int32
    # The sixteenth row is padding.
    assert batch["pair_labels"].tolist() == batch["sequence_weights"].tolist() == [1] * 15 + [0]
    assert batch["word_weights"][15].sum() == 0


def test_records_that_do_not_fit_the_config_are_refused(tmp_path):
    write_google_files(tmp_path)
    for change, message in (
        (dict(length=16), rf"length = 16, but input_ids in .*{FIRST} has 8 values"),
        (dict(predictions=20), r"max_predictions_per_seq = 20, but masked_lm_positions in .* has 2 values"),
        (dict(vocab_size=3), r"vocab_size = 3: must be above the token id \d+ in .*"),
    ):
        with pytest.raises(UserError, match=message):
            find(tmp_path, **change)


def test_damaged_empty_and_missing_files_are_named(tmp_path):
    for folder, message in (
        (tmp_path / "nowhere", "data.records = .*nowhere.: the folder does not exist"),
        (tmp_path, "contains no TFRecord files"),
    ):
        with pytest.raises(UserError, match=message):
            find(folder)
    write_google_files(tmp_path, files=1)
    content = (tmp_path / FIRST).read_bytes()
    for damaged, message in (
        (content[:-7], "tfrecord-00000: damaged"),
        (b"this is not a TFRecord file, is it?", "not a TFRecord file"),
        (b"", "contains no records"),
    ):
        (tmp_path / FIRST).write_bytes(damaged)
        with pytest.raises(UserError, match=message):
            find(tmp_path)


def test_the_number_of_files_is_read_from_file_names_only(tmp_path, records_folder):
    shutil.copytree(records_folder / "length32", tmp_path / "length32")
    assert find(tmp_path, 32, 5).total > 100
    (tmp_path / "length32" / "train-00003-of-00008.tfrecord").unlink()
    with pytest.raises(UserError, match="length32: contains 7 of 8 files"):
        find(tmp_path, 32, 5)
    write_google_files(tmp_path / "wiki-of-2020", files=2)
    assert find(tmp_path / "wiki-of-2020").total == 10


@pytest.fixture
def counted(monkeypatch):
    """Returns the names of the files whose records were counted."""
    names, count = [], record_sets.count_records
    monkeypatch.setattr(record_sets, "count_records", lambda path: names.append(path.rpartition("/")[2]) or count(path))
    return names


def test_records_without_a_manifest_are_counted_once(tmp_path, counted):
    folder = tmp_path / "records/length8"
    folder.parent.mkdir()
    write_google_files(folder)
    (folder / THIRD).rename(folder / "heldout.tfrecord")

    def counts(split="train"):
        counted.clear()
        return find(tmp_path / "records", split=split, cache=tmp_path / "run").counts

    assert counts() == (5, 5) and counted == [FIRST, SECOND]
    assert counts("heldout") == (5,) and counted == ["heldout.tfrecord"]  # appended to the same file
    assert counts() == (5, 5) and counts("heldout") == (5,) and not counted
    write_google_files(tmp_path / "other", files=1, rows=7)
    (tmp_path / "other" / FIRST).rename(folder / FIRST)
    assert counts() == (7, 5) and counted == [FIRST]
    assert counts() == (7, 5) and not counted
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["record_counts.json"]
    for _ in range(2):  # without a stored file of counts, no file is written
        counted.clear()
        assert find(tmp_path / "records").counts == (7, 5) and len(counted) == 2
    assert len(list(folder.iterdir())) == 3 and len(list(folder.parent.iterdir())) == 1


@pytest.mark.parametrize("content", ["{", "\x00\xff", "[1, 2]", '{"a": 5}', '{"a": {"bytes": [], "records": 3}}'])
def test_a_damaged_file_of_counts_is_rewritten(tmp_path, counted, content):
    write_google_files(tmp_path / "records", files=1)
    (tmp_path / "record_counts.json").write_text(content, "latin-1")
    for _ in range(2):
        assert find(tmp_path / "records", cache=tmp_path).counts == (5,) and len(counted) == 1
    path = tmp_path / "records" / FIRST
    expected = {str(path): {"bytes": path.stat().st_size, "records": 5}}
    assert json.loads((tmp_path / "record_counts.json").read_text()) == expected


def test_prepared_records_are_checked_against_the_manifest(records_folder, tmp_path):
    for name, content in (("empty", json.dumps(read_manifest(records_folder))), ("damaged", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(content)
    for arguments, message in (
        ((records_folder, 128, 20), "length = 128, but the records in .* have length 32, 64; set .* another folder"),
        ((records_folder, 32, 7), r"max_predictions_per_seq = 7, but .* with 5"),
        ((tmp_path / "empty", 32, 5), r"train-00000.*: missing, but listed"),
        ((tmp_path / "damaged", 32, 5), r"manifest.json: damaged, .*prepare the records again"),
    ):
        with pytest.raises(UserError, match=message):
            find(*arguments)


@pytest.fixture
def copied(records_folder, tmp_path):
    return shutil.copytree(records_folder, tmp_path / "copied")


def test_the_manifest_stores_sizes_and_checksums_of_files(records_folder):
    for stored_set in read_manifest(records_folder)["sets"].values():
        for path, entry in [*stored_set["train"].items(), *stored_set["heldout"].items()]:
            content = (records_folder / path).read_bytes()
            assert entry == {
                "records": record_sets.count_records(str(records_folder / path)),
                "bytes": len(content),
                "crc32c": google_crc32c.value(content),
                "head_crc32c": google_crc32c.value(content[:4096]),
                "lengths_crc32c": google_crc32c.value(lengths.path_of(records_folder / path).read_bytes()),
            }


SIZE, CONTENT = r"has [\d,]+ bytes; expected [\d,]+ by the manifest", "is overwritten"
CHANGES = {
    "truncated": (lambda content: content[:-5], SIZE),
    "empty": (lambda content: b"", SIZE),
    "longer": (lambda content: content + b"0", SIZE),
    "overwritten": (lambda content: bytes(len(content)), CONTENT),
}


@pytest.mark.parametrize("name", ["train-00003-of-00008", "heldout-00000-of-00001"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_differs_from_the_manifest_is_named(copied, name, change):
    changed, message = CHANGES[change]
    path = copied / f"length64/{name}.tfrecord"
    path.write_bytes(changed(path.read_bytes()))
    split, _, _ = name.partition("-")
    # The held-out split is this file alone: if it is skipped, no record is left.
    for on_corrupt in ("stop", "skip") if split == "heldout" else ("stop",):
        with pytest.raises(UserError, match=rf"{path}: {message}.*; copy or prepare it again"):
            find(copied, 64, 10, split, on_corrupt=on_corrupt)
    assert find(copied, 32, 5, split).total


def test_files_that_differ_from_the_manifest_can_be_skipped(copied, capfd):
    files = [copied / f"length64/train-0000{i}-of-00008.tfrecord" for i in (2, 5, 6)]
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, (contents[1], contents[0], contents[2][:-5])):
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00002-of-00008.tfrecord: .*\(and 2 more files are damaged\)"):
        find(copied, 64, 10)
    record_set = find(copied, 64, 10, on_corrupt="skip")
    assert find(copied, 64, 10, "heldout").skipped == {}
    assert record_set.skipped == {str(p): (range(record_set.counts[i]),) for i, p in zip((2, 5, 6), files)}
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 3 and all(str(p) in line and "; skipping its" in line for p, line in zip(files, lines))
    batches = heldout_batches(record_set, 64, 10, batch_size=record_set.total, max_sequences=record_set.total)
    is_lost = np.repeat([i in (2, 5, 6) for i in range(8)], record_set.counts)
    assert ((next(batches)["sequence_weights"] == 0) == is_lost).all()


def test_manifests_of_other_versions_and_recipes_are_read(copied):
    before, manifest = find(copied, 64, 10), read_manifest(copied)
    manifest["recipe"].pop("masking"), manifest.pop("layout")
    train = manifest["sets"]["64"]["train"]
    manifest["sets"]["64"]["train"] = {path: entry["records"] for path, entry in train.items()}
    write_manifest(copied, manifest)
    assert find(copied, 64, 10) == before
    # Records without static masks have no number of predictions.
    manifest["recipe"]["masking"], manifest["layout"] = "dynamic", "compact"
    write_manifest(copied, manifest)
    record_set = find(copied, 64, 7)
    assert (record_set.masking, record_set.layout, record_set.vocab_size) == ("dynamic", "compact", 150)


@pytest.mark.parametrize("measures", [False, True])
def test_a_manifest_with_too_large_counts_is_refused(copied, measures):
    """A reader that trusted the manifest would search for the missing records without end."""
    manifest = read_manifest(copied)
    files = manifest["sets"]["64"]["train"]
    path, entry = next(iter(files.items()))
    for wrong, message in (
        (2**31, r"train-00000-of-.*: [\d,]+ bytes are too few for the 2,147,483,648 records in"),
        ({**entry, "records": entry["records"] + 1000}, "train-00000-of-00008.lengths: differs from the manifest"),
    ):
        files[path] = wrong
        write_manifest(copied, manifest)
        with pytest.raises(UserError, match=message):
            find(copied, 64, 10, measures=measures)


def test_lengths_of_records_without_a_manifest_are_measured_once(tmp_path, monkeypatch):
    (tmp_path / "records").mkdir()
    write_sizes(tmp_path / "records" / FIRST, [3, 8, 5])
    write_sizes(tmp_path / "records" / SECOND, [6, 4])
    measured, measure = [], lengths._measure
    monkeypatch.setattr(lengths, "_measure", lambda path, *rest: measured.append(path) or measure(path, *rest))
    for _ in range(2):
        record_set = find(tmp_path / "records", cache=tmp_path / "run", measures=True)
        assert record_set.lengths.tolist() == [3, 8, 5, 6, 4] and len(measured) == 2
    assert find(tmp_path / "records").lengths is None


def test_a_damaged_record_does_not_affect_other_lengths(tmp_path):
    path = tmp_path / "a.tfrecord"
    write_sizes(path, [3, 8, 5, 6, 4])
    whole = path.read_bytes()
    record_sets.write_records(path, [google_block(1, input_mask=np.array([[1, 0]]))])  # of another length
    whole += path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 6 + 40] ^= 1  # the count of the second file
    path.write_bytes(damaged)
    arguments = ((str(path),), (6,), layouts.Format(8, 2), tmp_path / "lengths")
    assert lengths.measure_lengths(*arguments).tolist() == [3, 1, 5, 6, 4, 1]
    path.write_bytes(whole)  # unreadable lengths are not stored
    assert lengths.measure_lengths(*arguments).tolist() == [3, 8, 5, 6, 4, 1]


def test_stored_lengths_equal_the_records_and_damaged_length_files_are_named(copied):
    for length, predictions in ((32, 5), (64, 10)):
        record_set, form = find(copied, length, predictions), layouts.Format(length, predictions)
        np.testing.assert_array_equal(
            record_set.lengths, lengths.measure_lengths(record_set.paths, record_set.counts, form, None)
        )
    path = copied / "length32/train-00003-of-00008.lengths"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=rf"{path.name}: differs from the manifest"):
        find(copied, 32, 5)
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name}: cannot be read"):
        find(copied, 32, 5)
