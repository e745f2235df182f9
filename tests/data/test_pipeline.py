"""The batch of a step: a function of (seed, step, records), the same for any number of hosts."""

import dataclasses
import importlib
import itertools
import threading
from typing import NamedTuple

import numpy as np
import pytest

from bertjax.config import UserError
from bertjax.data import records
from bertjax.data.batches import order, pipeline
from bertjax.data.batches.masking import masks, rules_of
from bertjax.data.batches.order import Order
from bertjax.data.batches.packing import RowSize
from bertjax.data.records import RecordSet, layouts
from bertjax.data.records.serialization import tfrecords
from bertjax.data.tf import tf
from tests.data.test_records import GOOGLE, google_example


@pytest.fixture(params=["tf_data", "plain"], autouse=True)
def which(request, monkeypatch):
    """The reader: all of this holds for both."""
    module = importlib.import_module(f"bertjax.data.batches.readers.{request.param}")
    monkeypatch.setattr(pipeline, "reader", lambda: module)
    return request.param


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Files of unequal size whose records are numbered: input_ids[1] of each is its place in the set."""
    folder = tmp_path_factory.mktemp("numbered")
    number, paths, counts = 0, [], (37, 5, 0, 120, 64, 1, 73)
    for i, count in enumerate(counts):
        paths.append(str(folder / f"part-{i:05d}.tfrecord"))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for _ in range(count):
                writer.write(google_example({**GOOGLE, "input_ids": [101, number, 103, 102, 2088, 102, 0, 0]}))
                number += 1
    return RecordSet(tuple(paths), counts)


def numbers(files, steps, start=0, batch_size=16, seed=0, rows=np.arange):
    batches = pipeline.train_batches(Order(files, batch_size, seed, RowSize(8, 8)), 2, start=start, rows=rows)
    return np.array([batch["input_ids"][:, 1] for batch in itertools.islice(batches, steps)])


def test_any_step_can_be_computed_by_itself(numbered):
    straight = numbers(numbered, 90)
    for start in (1, 17, 18, 19, 60, 89):
        assert (numbers(numbered, 90 - start, start) == straight[start:]).all()
    assert (numbers(numbered, 90) == straight).all()
    assert (numbers(numbered, 5, seed=1) != straight[:5]).any()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [range(4), range(12, 16), [0, 1, 6, 7], [3], range(1, 16, 2)])
@pytest.mark.parametrize("lanes", [16, 4])
def test_hosts_share_the_same_global_batches(numbered, monkeypatch, rows, lanes):
    """Also where a host's rows do not lie side by side, or are half a lane's."""
    monkeypatch.setattr(order, "MAX_LANES", lanes)
    together = numbers(numbered, 60, start=7)
    assert (numbers(numbered, 60, 7, rows=lambda _: np.array(rows)) == together[:, np.array(rows)]).all()


@pytest.mark.slow
def test_each_record_comes_once_an_epoch(numbered):
    total, lanes = numbered.total, 4
    steps = total // lanes
    for epoch in range(3):
        seen = numbers(numbered, steps, start=epoch * steps, batch_size=lanes)
        assert len(set(seen.ravel())) == total
    first, second = numbers(numbered, steps, batch_size=4), numbers(numbered, steps, start=steps, batch_size=4)
    assert (first != second).any()


@pytest.mark.slow
def test_small_windows_shuffle_and_jump_alike(numbered, monkeypatch):
    monkeypatch.setattr(order, "SHUFFLE_WINDOW", 6)
    straight = numbers(numbered, 200, batch_size=4)
    for start in (5, 6, 100, 150):
        assert (numbers(numbered, 20, start, batch_size=4) == straight[start : start + 20]).all()
    # 25 windows of 6 are two epochs of 75: windows may run across the end of an epoch, and nothing is lost there.
    assert (np.bincount(straight[:150].ravel()) == 2).all()


def test_a_host_opens_only_its_share_of_the_files(tmp_path):
    files = RecordSet(tuple(f"shard-{i}" for i in range(64)), (100,) * 64)
    for hosts in (1, 2, 4, 8):
        opened = []
        for host in range(hosts):
            mine = set()
            for lane in range(host * 16 // hosts, (host + 1) * 16 // hosts):
                spans = Order(files, 16, 0, RowSize(8, 8)).spans(lane, 0)
                taken = 0
                while taken < 5 * 400:  # five epochs
                    path, _, count = next(spans)
                    mine.add(path)
                    taken += count
            opened.append(mine)
        assert all(len(mine) == 64 // hosts for mine in opened)
        assert len(set.union(*opened)) == 64


@pytest.mark.slow
def test_a_late_step_is_the_one_that_training_reaches(records_folder):
    found = records.find_records(records_folder, 32, 5, "train")
    order = Order(found, 16, 0, RowSize(32, 8))
    reached = next(itertools.islice(pipeline.train_batches(order, 5), 2000, None))
    computed = next(pipeline.train_batches(order, 5, start=2000))
    for name in reached:
        np.testing.assert_array_equal(computed[name], reached[name])


def test_a_late_step_is_computed_and_nothing_before_it_is_read(numbered, monkeypatch):
    """Step 50,000 is in epoch 666 of these 300 records, but a lane reads its window of 75, and perhaps one ahead."""
    taken, spans = [], Order.spans

    def spy(*arguments):
        for span in spans(*arguments):
            taken.append(span[2])
            yield span

    monkeypatch.setattr(Order, "spans", spy)
    numbers(numbered, 1, start=50_000, batch_size=4)
    assert 300 <= sum(taken) <= 600


def test_where_a_late_step_is_in_large_files():
    """Step 500,000 of 100 files of a million records each, none of which exist: its place is that of all before it."""
    files = RecordSet(tuple(f"shard-{i}" for i in range(100)), (1_000_000,) * 100)
    order = Order(files, 256, 0, RowSize(8, 8))
    assert (order.lanes, order.window, order.steps) == (64, 4096, 1024)
    for lane in (0, 1, 33, 63):
        before, spans = 500_000 // 1024 * 4096, order.spans(lane, 0)
        path, first, count = next(spans)
        while count <= before:
            before -= count
            path, first, count = next(spans)
        assert next(order.spans(lane, 500_000)) == (path, first + before, count - before)


def test_held_out_batches_go_through_once_on_any_number_of_hosts(numbered):
    def batches(rows=np.arange):
        return list(pipeline.heldout_batches(numbered, 8, 2, batch_size=16, max_sequences=250, rows=rows))

    together = batches()
    ids = np.concatenate([b["input_ids"][:, 1] for b in together])
    weights = np.concatenate([b["sequence_weights"] for b in together])
    assert ids[weights > 0].tolist() == list(range(250)) and len(ids) == 256
    parts = [batches(lambda _, h=h: np.arange(h * 4, h * 4 + 4)) for h in range(4)]
    for number, batch in enumerate(together):
        for name in batch:
            assert (np.concatenate([p[number][name] for p in parts]) == batch[name]).all()


def test_no_reader_has_a_thread_that_its_end_waits_for_or_that_outlives_it(records_folder, which, monkeypatch):
    """That of tf.data's autotuning sleeps up to a minute, and tunes whatever is left to it."""
    before = set(threading.enumerate())
    made, make = [], tf.data.Dataset.as_numpy_iterator
    monkeypatch.setattr(tf.data.Dataset, "as_numpy_iterator", lambda self: made.append(self) or make(self))
    files, row = records.find_records(records_folder, 32, 5, "train"), RowSize(32, 8, 40)
    with_lengths, without = Order(files, 16, 0, row), Order(dataclasses.replace(files, lengths=None), 16, 0, row)
    readers = [pipeline.train_batches(each, 5) for each in (with_lengths, without)]
    readers.append(pipeline.packed_batches(with_lengths, 5, multiple=1))
    readers.append(pipeline.heldout_batches(files, 32, 5, batch_size=16, max_sequences=16))
    for reader in readers:
        next(reader)
        reader.close()
    assert len(made) == (4 if which == "tf_data" else 0)
    assert not any(dataset.options().autotune.enabled for dataset in made)
    assert which == "tf_data" or set(threading.enumerate()) == before


def test_what_does_not_fit_together_is_refused(numbered):
    few = RecordSet(numbered.paths[1:2], numbered.counts[1:2])
    with pytest.raises(UserError, match=r"5 training records are too few for a batch of 16 sequences"):
        numbers(few, 1)


# Layouts and dynamic masking.


class Pieces(NamedTuple):
    """What masking needs to know of a tokenizer."""

    vocab_size: int = 1000
    mask_id: int = 3
    cls_id: int = 1
    sep_id: int = 2


LENGTH, PREDICTIONS = 16, 3
DATA = dict(masked_lm_prob=0.2, masked_lm_split=(0.8, 0.1, 0.1), do_whole_word_mask=False, do_span_mask=False)
RULES = rules_of(DATA, Pieces(), PREDICTIONS)


def random_rows(count, vocab_size=1000, is_masked=True, seed=0):
    rng = np.random.default_rng(seed)
    number = layouts.number_type(LENGTH, vocab_size)
    fields = [("ids", number, (LENGTH,)), ("size", number), ("first_size", number), ("label", number)]
    predictions = [("positions", number, (PREDICTIONS,)), ("labels", number, (PREDICTIONS,)), ("masked", number)]
    rows = np.zeros(count, fields + predictions * is_masked)
    rows["size"] = rng.integers(6, LENGTH + 1, count)
    rows["first_size"], rows["label"] = rng.integers(2, rows["size"]), rng.integers(2, size=count)
    inside = np.arange(LENGTH) < rows["size"][:, None]
    rows["ids"] = np.where(inside, rng.integers(4, vocab_size, inside.shape), 0)
    rows["ids"][:, 0], rows["ids"][np.arange(count), rows["size"] - 1] = Pieces().cls_id, Pieces().sep_id
    if is_masked:
        rows["masked"] = rng.integers(1, PREDICTIONS + 1, count)
        used = np.arange(PREDICTIONS) < rows["masked"][:, None]
        rows["positions"] = np.where(used, np.sort(rng.integers(1, 6, used.shape), axis=1), 0)
        rows["labels"] = np.where(used, rng.integers(4, vocab_size, used.shape), 0)
    return rows


def write_set(folder, rows, layout="google", files=3, vocab_size=1000, **fields):
    folder.mkdir()
    paths = [str(folder / f"{i}.tfrecord") for i in range(files)]
    parts = np.array_split(rows, files)
    for path, part in zip(paths, parts):
        records.write_records(path, [layouts.features_of(part, layout)])
    masking = "static" if "masked" in rows.dtype.names else "dynamic"
    return RecordSet(tuple(paths), tuple(map(len, parts)), layout, masking, vocab_size, **fields)


def batches_of(files, steps=None, **settings):
    order = Order(files, settings.pop("batch_size", 8), settings.pop("seed", 0), RowSize(LENGTH, 8, 8))
    settings = dict(additions=[masks(RULES)] if files.masking == "dynamic" else []) | settings
    read = pipeline.packed_batches if "multiple" in settings else pipeline.train_batches
    return list(itertools.islice(read(order, PREDICTIONS, **settings), steps))


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others):
        assert batch.keys() == other.keys()
        for name in batch:
            assert batch[name].dtype == other[name].dtype and (batch[name] == other[name]).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("masking", ["static", "dynamic"])
@pytest.mark.parametrize("vocab_size", [1000, 65_536, 200_000])
def test_the_compact_layout_gives_the_same_batches_from_smaller_files(tmp_path, masking, vocab_size):
    rows = random_rows(120, vocab_size, masking == "static")
    google, compact = (
        write_set(tmp_path / layout, rows, layout, vocab_size=vocab_size) for layout in ("google", "compact")
    )
    assert_same(batches_of(google, 20), batches_of(compact, 20))
    for batch in batches_of(compact, 20):
        assert set(batch) == {*layouts.NAMES_IN_BATCH.values(), "sequence_weights"}
        assert batch["input_ids"].shape == (8, LENGTH) and batch["pair_labels"].shape == (8,)
    if masking == "static":
        found = np.concatenate([batch["input_ids"] for batch in batches_of(compact, 15)])
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, rows["ids"].tolist()))


@pytest.fixture
def unmasked(tmp_path):
    return write_set(tmp_path / "unmasked", random_rows(96, is_masked=False))


@pytest.mark.slow
def test_dynamic_masks_are_a_function_of_seed_step_and_row(unmasked):
    straight = batches_of(unmasked, 30)
    assert_same(straight[17:], batches_of(unmasked, 13, start=17))
    for rows in ([0, 1, 2], [5], [1, 3, 6]):
        own = batches_of(unmasked, 13, start=17, rows=lambda _, rows=rows: np.array(rows))
        assert_same([{name: x[rows] for name, x in batch.items()} for batch in straight[17:]], own)


def restored(batch):
    """The tokens before they were masked."""
    ids, used = batch["input_ids"].copy(), batch["word_weights"] > 0
    ids[np.nonzero(used)[0], batch["word_positions"][used]] = batch["word_ids"][used]
    return ids


@pytest.mark.slow
def test_dynamic_masks_differ_from_epoch_to_epoch_and_with_the_seed(unmasked):
    masks = {}
    for batch in batches_of(unmasked, 96):  # eight epochs
        assert (batch["word_weights"].sum(1) >= 1).all()
        for ids, masked in zip(restored(batch), batch["input_ids"]):
            masks.setdefault(tuple(ids), []).append(tuple(masked))
    assert masks.keys() == {tuple(ids) for ids in random_rows(96, is_masked=False)["ids"]}
    assert {len(found) for found in masks.values()} == {8}
    assert np.mean([len(set(found)) for found in masks.values()]) > 7
    first, second = batches_of(unmasked, 1)[0], batches_of(unmasked, 1, seed=1)[0]
    shared = {tuple(x): tuple(y) for x, y in zip(restored(first), first["input_ids"])}
    shared = [(shared[tuple(x)], tuple(y)) for x, y in zip(restored(second), second["input_ids"]) if tuple(x) in shared]
    assert all(one != other for one, other in shared)


def test_held_out_masks_are_a_function_of_place_and_seed(unmasked):
    def evaluated(batch_size, seed=0):
        batches = pipeline.heldout_batches(
            unmasked, LENGTH, PREDICTIONS, batch_size=batch_size, max_sequences=90, additions=[masks(RULES)], seed=seed
        )
        batches = list(batches)
        weights = np.concatenate([batch["sequence_weights"] for batch in batches])
        assert weights.sum() == 90 and not weights[90:].any()
        return {name: np.concatenate([batch[name] for batch in batches])[:90] for name in batches[0]}

    assert_same([evaluated(16)], [evaluated(40)])
    assert (evaluated(16)["input_ids"] != evaluated(16, seed=1)["input_ids"]).any(1).mean() > 0.9


# Faults.


def frames(content):
    """The place and size of each record of a TFRecord file."""
    place = 0
    while place < len(content):
        size = int.from_bytes(content[place : place + 8], "little")
        yield place, size
        place += size + 16


def flip(path, record):
    content = bytearray(open(path, "rb").read())
    place, size = list(frames(content))[record]
    content[place + 12 + size // 2] ^= 4
    open(path, "wb").write(content)


def flip_length(path, record):
    content = bytearray(open(path, "rb").read())
    content[list(frames(content))[record][0]] ^= 1
    open(path, "wb").write(content)


def cut(path, record):
    content = open(path, "rb").read()
    open(path, "wb").write(content[: list(frames(content))[record][0] + 20])


def cut_between(path, record):
    content = open(path, "rb").read()
    open(path, "wb").write(content[: list(frames(content))[record][0]])


def replace(path, record):
    """By a valid record of something else."""
    content = open(path, "rb").read()
    place, size = list(frames(content))[record]
    other = tfrecords({"something": np.zeros((1, 3), int)})
    open(path, "wb").write(content[:place] + other + content[place + size + 16 :])


# What it does to the second of three files of 40 records, of which record 11 is damaged; and the records lost.
DAMAGES = [
    (flip, [11]),
    (flip_length, range(11, 40)),
    (cut, range(11, 40)),
    (cut_between, range(11, 40)),
    (replace, [11]),
]


@pytest.mark.slow
@pytest.mark.parametrize("damage, lost", DAMAGES)
@pytest.mark.parametrize("layout", ["google", "compact"])
def test_a_damaged_record_is_named(tmp_path, damage, lost, layout):
    files = write_set(tmp_path / "records", random_rows(120), layout)
    damage(files.paths[1], 11)
    with pytest.raises(UserError, match=r"1.tfrecord: record 11 (is|lacks) .*on_corrupt=skip"):
        batches_of(files, 15)
    with pytest.raises(UserError, match=r"1.tfrecord: record 11 (is|lacks) .*on_corrupt=skip"):
        list(pipeline.heldout_batches(files, LENGTH, PREDICTIONS, batch_size=8, max_sequences=999))


@pytest.mark.slow
@pytest.mark.parametrize("masking, damage, lost", [("static", *each) for each in DAMAGES] + [("dynamic", flip, [11])])
def test_skipped_records_are_empty_rows_and_all_others_stay_where_they_were(tmp_path, masking, damage, lost, capfd):
    files = write_set(tmp_path / "records", random_rows(120, is_masked=masking == "static"), on_corrupt="skip")
    whole = batches_of(files, 45)  # three epochs
    damage(files.paths[1], 11)
    damage(files.paths[2], 11)
    found = batches_of(files, 45)
    printed = capfd.readouterr().out.splitlines()
    for name in ("1", "2"):
        (line,) = [line for line in printed if f"{name}.tfrecord" in line]
        assert ": record 11 " in line and f"skipping {len(lost)} of its 40 records" in line
    empty = 0
    for batch, before in zip(found, whole):
        is_empty = batch["sequence_weights"] == 0
        for name in batch:
            assert not batch[name][is_empty].any()
            assert (batch[name][~is_empty] == before[name][~is_empty]).all()
        empty += is_empty.sum()
    assert empty == 3 * 2 * len(lost)
    assert_same(found[29:], batches_of(files, 16, start=29))
    assert_same(
        [{name: x[:3] for name, x in batch.items()} for batch in found],
        batches_of(files, 45, rows=lambda _: np.arange(3)),
    )


def test_held_out_records_are_skipped_alike(tmp_path, capfd):
    files = write_set(tmp_path / "records", random_rows(120), on_corrupt="skip")
    flip(files.paths[0], 0)
    cut(files.paths[1], 30)
    batches = pipeline.heldout_batches(files, LENGTH, PREDICTIONS, batch_size=16, max_sequences=110)
    weights = np.concatenate([batch["sequence_weights"] for batch in batches])
    assert np.flatnonzero(weights == 0).tolist() == [0, *range(70, 80), 110, 111]
    assert "0.tfrecord: record 0 is" in (printed := capfd.readouterr().out) and "1.tfrecord: record 30 is" in printed


def test_a_file_that_disappears_is_named(tmp_path):
    files = write_set(tmp_path / "records", random_rows(120), on_corrupt="skip")
    (tmp_path / "records/2.tfrecord").unlink()
    with pytest.raises(UserError, match=r"2.tfrecord: cannot be read"):
        batches_of(files, 15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "field, value, name",
    [("ids", 1000, "input_ids"), ("labels", 1500, "masked_lm_ids"), ("positions", 16, "masked_lm_positions"),
     ("label", 2, "next_sentence_labels")],
)  # fmt: skip
def test_values_that_no_record_has_are_named(tmp_path, monkeypatch, field, value, name):
    monkeypatch.setattr(order, "SHUFFLE_WINDOW", 7)
    rows = random_rows(120)
    rows[field][77] = value
    files = write_set(tmp_path / "records", rows)
    message = rf"1.tfrecord: record 37 has {value} in {name}, which must be from 0 to"
    with pytest.raises(UserError, match=message):
        batches_of(files, 15)
    with pytest.raises(UserError, match=message):
        list(pipeline.heldout_batches(files, LENGTH, PREDICTIONS, batch_size=16, max_sequences=120))


def test_values_that_no_record_has_are_named_before_they_are_masked(tmp_path):
    rows = random_rows(120, is_masked=False)
    rows["ids"][77] = 1200
    files = write_set(tmp_path / "records", rows)
    rules = RULES._replace(continues_word=np.zeros(1000, bool))
    with pytest.raises(UserError, match=r"1\.tfrecord: record 37 has 1200 in input_ids"):
        batches_of(files, 15, additions=[masks(rules)])


def test_if_no_record_can_be_read_skipping_them_is_refused(tmp_path):
    files = write_set(tmp_path / "records", random_rows(120), on_corrupt="skip")
    files = dataclasses.replace(files, layout="compact")
    with pytest.raises(UserError, match="none of the records can be read"):
        batches_of(files, 1)
