"""The batch of a step is a function of (seed, step, records) and independent of the number of hosts."""

import dataclasses
import importlib
import itertools
import pathlib
import threading
from typing import NamedTuple

import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.data.batch import RECORD_ARRAYS, RowSize, record_arrays
from bertjax.data.loading import order, pipeline
from bertjax.data.loading.masking import masking_of
from bertjax.data.loading.order import Order
from bertjax.data.loading.transforms import SeededTransform
from bertjax.data.records import layouts, record_sets
from bertjax.data.records.record_sets import RecordSet
from bertjax.data.records.serialization import tfrecords
from tests.data.test_records import GOOGLE, google_block


@pytest.fixture
def reader_name(request, monkeypatch):
    """Sets the reader of records, "plain" or "tf_data", by indirect parametrization."""
    module = importlib.import_module(f"bertjax.data.loading.readers.{request.param}")
    monkeypatch.setattr(pipeline, "reader", lambda: module)
    return request.param


both_readers = pytest.mark.parametrize("reader_name", ["tf_data", "plain"], indirect=True)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Writes files of unequal size whose records are numbered: input_ids[1] is the number of the record in the set."""
    folder, counts = tmp_path_factory.mktemp("numbered"), (37, 5, 0, 120, 64, 1, 73)
    paths = [str(folder / f"part-{i:05d}.tfrecord") for i in range(len(counts))]
    ids = np.tile(GOOGLE["input_ids"], (sum(counts), 1))
    ids[:, 1] = np.arange(len(ids))
    for path, part in zip(paths, np.split(ids, np.cumsum(counts)[:-1])):
        record_sets.write_records(path, [google_block(len(part), input_ids=part)])
    return RecordSet(tuple(paths), counts)


def numbers(files, steps, start=0, batch_size=16, seed=0, rows=np.arange):
    order_of_files = Order(files, batch_size, seed, RowSize(8, 8))
    batches = pipeline.train_batches(order_of_files, RECORD_ARRAYS, 2, start=start, rows=rows)
    return np.array([batch["input_ids"][:, 1] for batch in itertools.islice(batches, steps)])


@pytest.mark.parametrize("window", [order.SHUFFLE_WINDOW, 6])
def test_any_step_can_be_computed_independently(numbered, monkeypatch, window):
    """Two epochs of 75 steps are 25 windows of six steps.

    One window crosses the end of an epoch, and no record is lost.
    """
    monkeypatch.setattr(order, "SHUFFLE_WINDOW", window)
    straight = numbers(numbered, 150, batch_size=4)
    for start in (1, 5, 6, 74, 100):
        assert (numbers(numbered, 20, start, batch_size=4) == straight[start : start + 20]).all()
    assert (numbers(numbered, 5, batch_size=4, seed=1) != straight[:5]).any()
    assert (np.bincount(straight.ravel()) == 2).all()
    if window > 6:
        assert (np.bincount(straight[:75].ravel()) == 1).all() and (straight[:75] != straight[75:]).any()


@pytest.mark.parametrize("lanes", [16, 4])
def test_hosts_share_the_same_global_batches(numbered, monkeypatch, lanes):
    """The rows of a host may be non-adjacent, or half the rows of a lane."""
    monkeypatch.setattr(order, "MAX_LANES", lanes)
    together = numbers(numbered, 30, start=7)
    for rows in (range(4), range(12, 16), [0, 1, 6, 7], [3], range(1, 16, 2)):
        assert (numbers(numbered, 30, 7, rows=lambda _, rows=rows: np.array(rows)) == together[:, np.array(rows)]).all()


def test_a_host_opens_only_a_share_of_the_files():
    files = RecordSet(tuple(f"shard-{i}" for i in range(64)), (100,) * 64)
    spans = [Order(files, 16, 0, RowSize(8, 8)).spans(lane, 0) for lane in range(16)]
    opened = [{path for path, _, _ in itertools.islice(lane, 20)} for lane in spans]  # five epochs of four files
    for hosts in (1, 2, 4, 8):
        host_files = [set.union(*opened[host * 16 // hosts : (host + 1) * 16 // hosts]) for host in range(hosts)]
        assert all(len(mine) == 64 // hosts for mine in host_files) and len(set.union(*host_files)) == 64


def test_a_late_step_reads_only_the_records_of_its_window(numbered, monkeypatch):
    """Step 50,000 is in epoch 666 of these 300 records.

    A lane reads its window of 75 records, and perhaps the next one.
    """
    taken, spans = [], Order.spans

    def spy(*arguments):
        for span in spans(*arguments):
            taken.append(span[2])
            yield span

    monkeypatch.setattr(Order, "spans", spy)
    numbers(numbered, 1, start=50_000, batch_size=4)
    assert 300 <= sum(taken) <= 600


def test_held_out_records_are_read_once_on_any_number_of_hosts(numbered):
    def batches(rows=np.arange):
        return list(
            pipeline.heldout_batches(
                numbered, record_arrays(numbered.masking), 8, 2, batch_size=16, max_sequences=250, rows=rows
            )
        )

    together = batches()
    ids = np.concatenate([b["input_ids"][:, 1] for b in together])
    weights = np.concatenate([b["sequence_weights"] for b in together])
    assert ids[weights > 0].tolist() == list(range(250)) and len(ids) == 256
    parts = zip(*(batches(lambda _, h=h: np.arange(h * 4, h * 4 + 4)) for h in range(4)))
    assert_same(together, [{name: np.concatenate([p[name] for p in step]) for name in step[0]} for step in parts])


@pytest.mark.slow
@both_readers
def test_readers_close_at_once_and_leave_no_threads(records_folder, reader_name, monkeypatch):
    """The autotuning thread of tf.data sleeps up to a minute, and tunes the pipelines that still exist."""
    from bertjax.data.tensorflow import tf

    before = set(threading.enumerate())
    made, make = [], tf.data.Dataset.as_numpy_iterator
    monkeypatch.setattr(tf.data.Dataset, "as_numpy_iterator", lambda self: made.append(self) or make(self))
    files, row = record_sets.find_records(records_folder, 32, 5, "train"), RowSize(32, 8, 40)
    with_lengths, without = Order(files, 16, 0, row), Order(dataclasses.replace(files, lengths=None), 16, 0, row)
    readers = [pipeline.train_batches(records, RECORD_ARRAYS, 5) for records in (with_lengths, without)]
    readers.append(pipeline.packed_batches(with_lengths, RECORD_ARRAYS.packed(), 5, multiple=1))
    readers.append(pipeline.heldout_batches(files, RECORD_ARRAYS, 32, 5, batch_size=16, max_sequences=16))
    for reader in readers:
        next(reader)
        reader.close()
    assert len(made) == (4 if reader_name == "tf_data" else 0)
    assert not any(dataset.options().autotune.enabled for dataset in made)
    assert reader_name == "tf_data" or set(threading.enumerate()) == before


def test_incompatible_batch_settings_are_refused(numbered):
    few = RecordSet(numbered.paths[1:2], numbered.counts[1:2])
    with pytest.raises(UserError, match=r"batch_size = 16: needs at least 16 training records, but there are 5; "):
        numbers(few, 1)


# Layouts and dynamic masking.


class Pieces(NamedTuple):
    """The attributes of a tokenizer that masking reads."""

    vocab_size: int = 1000
    mask_id: int = 3
    cls_id: int = 1
    sep_id: int = 2


LENGTH, PREDICTIONS = 16, 3
DATA = dict(masked_lm_prob=0.2, masked_lm_split=(0.8, 0.1, 0.1), do_whole_word_mask=False, do_span_mask=False)
MASKING = masking_of(DATA, Pieces(), PREDICTIONS)
WORDS = {"continues_word": np.arange(1000) % 3 == 0}


def random_rows(count, vocab_size=1000, is_masked=True):
    rng = np.random.default_rng(0)
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
        record_sets.write_records(path, [layouts.features_of(part, layout)])
    masking = "static" if "masked" in rows.dtype.names else "dynamic"
    return RecordSet(tuple(paths), tuple(map(len, parts)), layout, masking, vocab_size, **fields)


def batches_of(files, steps=None, **settings):
    row = settings.pop("row", RowSize(LENGTH, 8, 8))
    order = Order(files, settings.pop("batch_size", 8), settings.pop("seed", 0), row)
    settings = dict(transforms=[masks(MASKING)] if files.masking == "dynamic" else []) | settings
    if "multiple" in settings:
        batches = pipeline.packed_batches(order, RECORD_ARRAYS.packed(), PREDICTIONS, **settings)
    else:
        batches = pipeline.train_batches(order, RECORD_ARRAYS, PREDICTIONS, **settings)
    return list(itertools.islice(batches, steps))


def masks(masking):
    return SeededTransform(masking)


def heldout(files, batch_size=16, max_sequences=120, **settings):
    """Returns the held-out batches as one batch."""
    settings |= dict(batch_size=batch_size, max_sequences=max_sequences)
    spec = RECORD_ARRAYS if "transforms" in settings else record_arrays(files.masking)
    batches = list(pipeline.heldout_batches(files, spec, LENGTH, PREDICTIONS, **settings))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected):
        assert batch.keys() == other.keys()
        for name in batch:
            assert batch[name].dtype == other[name].dtype and (batch[name] == other[name]).all(), name


@pytest.fixture
def unmasked(tmp_path):
    return write_set(tmp_path / "unmasked", random_rows(96, is_masked=False))


@pytest.mark.parametrize("words", [{}, WORDS, {**WORDS, "spans": True}], ids=["tokens", "words", "spans"])
def test_dynamic_masks_are_a_function_of_seed_step_and_row(unmasked, words):
    transforms = [masks(dataclasses.replace(MASKING, **words))]
    straight = batches_of(unmasked, 30, transforms=transforms)
    assert_same(straight[17:], batches_of(unmasked, 13, start=17, transforms=transforms))
    for rows in ([0, 1, 2], [5], [1, 3, 6]):
        host_batches = batches_of(
            unmasked, 13, start=17, rows=lambda _, rows=rows: np.array(rows), transforms=transforms
        )
        assert_same([{name: x[rows] for name, x in batch.items()} for batch in straight[17:]], host_batches)


def test_dynamic_masks_differ_from_epoch_to_epoch_and_with_the_seed(unmasked):
    masked_rows = {}
    for batch in [*batches_of(unmasked, 48), *batches_of(unmasked, 48, seed=1)]:  # four epochs each
        assert (batch["word_weights"].sum(1) >= 1).all()
        ids, used = batch["input_ids"].copy(), batch["word_weights"] > 0
        ids[np.nonzero(used)[0], batch["word_positions"][used]] = batch["word_ids"][used]
        for restored, masked in zip(ids, batch["input_ids"]):
            masked_rows.setdefault(tuple(restored), []).append(tuple(masked))
    assert masked_rows.keys() == {tuple(ids) for ids in random_rows(96, is_masked=False)["ids"]}
    assert {len(masks_of_row) for masks_of_row in masked_rows.values()} == {8}
    assert np.mean([len(set(masks_of_row)) for masks_of_row in masked_rows.values()]) > 7


def test_another_seed_gives_other_masks_of_the_same_text(tmp_path):
    files = write_set(tmp_path / "same", np.repeat(random_rows(1, is_masked=False), 32))
    first, second = (np.concatenate([b["input_ids"] for b in batches_of(files, 4, seed=seed)]) for seed in (0, 1))
    assert (first != second).any(1).mean() > 0.9


def test_held_out_masks_are_a_function_of_position_and_seed(unmasked):
    def evaluated(batch_size, seed=0):
        batch = heldout(unmasked, batch_size, 90, transforms=[masks(MASKING)], seed=seed)
        assert batch["sequence_weights"].sum() == 90 and not batch["sequence_weights"][90:].any()
        return {name: x[:90] for name, x in batch.items()}

    assert_same([evaluated(16)], [evaluated(40)])
    assert (evaluated(16)["input_ids"] != evaluated(16, seed=1)["input_ids"]).any(1).mean() > 0.9


# Faults.


def damage(how, path, record):
    """Damages a record of a TFRecord file."""
    content, place = bytearray(pathlib.Path(path).read_bytes()), 0
    for _ in range(record):
        place += int.from_bytes(content[place : place + 8], "little") + 16
    size = int.from_bytes(content[place : place + 8], "little")
    match how:
        case "flip":
            content[place + 12 + size // 2] ^= 4
        case "flip the length":
            content[place] ^= 1
        case "cut":
            del content[place + 20 :]
        case "cut between":
            del content[place:]
        case "replace":  # by a valid record with other content
            content[place : place + size + 16] = tfrecords({"something": np.zeros((1, 3), int)})
    pathlib.Path(path).write_bytes(content)


DAMAGES = [
    ("flip", 1, "google", False),
    ("cut between", 29, "compact", True),
    ("replace", 1, "google", True),
    ("replace", 1, "compact", True),
    # tf.data raises the same error as for the first record.
    ("flip the length", 29, "compact", True),
    ("cut", 29, "google", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "reader_name, how, lost, layout, is_masked",
    [*(("plain", *each) for each in DAMAGES), *(("tf_data", *each) for each in DAMAGES[:4])],
    indirect=["reader_name"],
)
def test_a_damaged_record_is_an_error_or_an_empty_row(tmp_path, reader_name, how, lost, layout, is_masked, capfd):
    """Record 11 of the second and the third file is damaged. All other rows keep their positions."""
    files = write_set(tmp_path / "records", random_rows(120, is_masked=is_masked), layout)
    whole = batches_of(files, 30)  # two epochs
    for path in files.paths[1:]:
        damage(how, path, 11)
    for read in (batches_of, heldout):
        with pytest.raises(UserError, match=r"1.tfrecord: record 11 (is|lacks) .*on_corrupt=skip"):
            read(files)
    files = dataclasses.replace(files, on_corrupt="skip")
    capfd.readouterr()
    batches = batches_of(files, 30)
    printed = capfd.readouterr().out
    for name in ("1", "2"):
        assert printed.count(f"{name}.tfrecord: record 11 ") == 1
    assert printed.count(f"skipping {lost} of its 40 records") == 2
    weights = heldout(files)["sequence_weights"][:120]
    assert np.flatnonzero(weights == 0).tolist() == [*range(51, 51 + lost), *range(91, 91 + lost)]
    is_empty = np.array([batch["sequence_weights"] == 0 for batch in batches])
    assert is_empty.sum() == 2 * 2 * lost
    expected = [{k: np.where(gone.reshape(-1, *[1] * (x.ndim - 1)), 0, x).astype(x.dtype) for k, x in batch.items()}
                for gone, batch in zip(is_empty, whole)]  # fmt: skip
    assert_same(batches, expected)
    if reader_name == "plain":  # test_readers compares the batches of both readers at any step
        assert_same(batches[19:], batches_of(files, 11, start=19))
        some = [{name: x[:3] for name, x in batch.items()} for batch in batches]
        assert_same(some, batches_of(files, 30, rows=lambda _: np.arange(3)))


@both_readers
def test_files_without_a_readable_record_are_refused(tmp_path, reader_name):
    files = write_set(tmp_path / "records", random_rows(120), on_corrupt="skip")
    with pytest.raises(UserError, match="none of the records can be read"):
        batches_of(dataclasses.replace(files, layout="compact"), 1)
    (tmp_path / "records/2.tfrecord").unlink()
    with pytest.raises(UserError, match=r"2.tfrecord: cannot be read"):
        batches_of(files, 15)


@pytest.mark.parametrize("field, value, name, is_masked", [
    ("ids", 1000, "input_ids", True),
    ("ids", 1200, "input_ids", False),  # before the masking rules look up the ids
    ("labels", 1500, "masked_lm_ids", True),
    ("positions", 16, "masked_lm_positions", True),
    ("label", 2, "next_sentence_labels", True),
])  # fmt: skip
def test_out_of_range_values_in_records_are_named(tmp_path, monkeypatch, field, value, name, is_masked):
    monkeypatch.setattr(order, "SHUFFLE_WINDOW", 7)
    rows = random_rows(120, is_masked=is_masked)
    rows[field][77] = value
    files = write_set(tmp_path / "records", rows)
    settings = (
        {} if is_masked else dict(transforms=[masks(dataclasses.replace(MASKING, continues_word=np.zeros(1000, bool)))])
    )
    for read in (batches_of, heldout):
        with pytest.raises(UserError, match=rf"1.tfrecord: record 37 has {value} in {name}, which must be from 0 to"):
            read(files, **settings)
