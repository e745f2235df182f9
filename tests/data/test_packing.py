"""Packing: the properties of an arrangement, and packed batches compared with padded batches."""

import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.data.batch import RowSize
from bertjax.data.loading import order
from bertjax.data.loading.order import Order
from bertjax.data.loading.packing import arrange
from bertjax.data.records.record_sets import RecordSet
from tests.data.test_pipeline import LENGTH, MASKING, assert_same, batches_of, damage, masks, random_rows, write_set

ROW = RowSize(512, 8)


def rng(seed=0):
    return np.random.default_rng(seed)


def assert_arrangement(arrangement, lengths, size, row=ROW):
    """Asserts that every sequence occurs once, every step has `size` sequences, and sequences of a row are adjacent and
    fit.
    """
    there = arrangement.order >= 0
    assert sorted(arrangement.order[there]) == list(range(len(lengths)))
    assert (
        arrangement.order.shape == (-(-len(lengths) // size), size) and (there.sum(1) == size).sum() >= len(there) - 1
    )
    for step, is_there in enumerate(there):
        rows, starts = arrangement.rows[step][is_there], arrangement.starts[step][is_there]
        row_lengths = lengths[arrangement.order[step][is_there]].astype(int)
        assert (
            (np.diff(rows) >= 0).all()
            and set(rows) == set(range(rows.max() + 1))
            and rows.max() < arrangement.row_count
        )
        for number in set(rows):
            ends = np.cumsum(row_lengths[rows == number])
            assert (starts[rows == number] == ends - row_lengths[rows == number]).all()
            assert ends[-1] <= row.tokens and len(ends) <= row.sequences


def like_wikipedia(count, seed=0):
    """Full rows and the ends of documents, as in Wikipedia."""
    return np.where(rng(seed).random(count) < 0.4, 512, rng(seed + 1).integers(20, 512, count)).astype(np.uint16)


@pytest.mark.parametrize("size", [1, 4, 5, 8, 48, 64])
def test_every_sequence_is_packed_once_and_steps_have_equal_numbers(size):
    """Sizes need not divide evenly: rows of three cannot be dealt to steps of four."""
    repeated = [[512], [170], [64], [1], [171, 341], [512, 1], [512, 300, 30]]
    for lengths in (*map(like_wikipedia, (5, 1003, 4096)), *(np.resize(some, 240) for some in repeated)):
        for row in (ROW, RowSize(512, 4)):
            assert_arrangement(arrange(lengths, size, row, rng()), lengths, size, row)


def test_rows_are_full():
    lengths = like_wikipedia(64 * 1024)
    arrangement = arrange(lengths, 64, ROW, rng())
    needed = lengths.sum(dtype=int) / 512 / 1024
    assert needed < arrangement.row_count < needed + 1.2  # the last row of a step need not be full
    assert (arrangement.rows.max(1) + 1).mean() < needed / 0.99


@pytest.mark.parametrize("wrong", [0, 513])
def test_a_length_that_no_row_can_hold_is_refused(wrong):
    with pytest.raises(UserError, match=f"a sequence has {wrong} tokens, but a row holds 1 to 512"):
        arrange(np.array([100, wrong, 200]), 2, ROW, rng())


def test_sequences_are_shuffled_over_all_steps():
    """Over many seeds: the mean step of the longest, the shortest and full-length sequences; and the neighbours."""
    lengths, seeds = np.concatenate([[511, 1, 512], rng().integers(20, 500, 197)]), 150
    steps, companions = np.empty((seeds, 200), int), set()
    for seed, step in enumerate(steps):
        step[arrange(lengths, 8, ROW, rng(seed)).order.ravel()] = np.repeat(np.arange(25), 8)
        companions |= set(np.flatnonzero(step == step[7]))
    mean, error = steps.mean(0), 25 / 12**0.5 / seeds**0.5
    assert abs(mean[:3] - 12).max() < 4 * error and (abs(mean - 12) < 2 * error).mean() > 0.9
    assert len(companions) > 195


# Packed batches.


@pytest.fixture(params=["static", "dynamic"])
def packable(request, tmp_path):
    return measured_set(tmp_path, request.param == "static")


def measured_set(folder, is_masked=True, count=240, shorter=0, **fields):
    """Records with their lengths; most records are short."""
    rows = random_rows(count, is_masked=is_masked)
    rows["size"] = np.minimum(rows["size"], rng().integers(6, 17, count))
    rows["first_size"] = np.minimum(rows["first_size"], rows["size"])
    return write_set(folder / "records", rows, lengths=(rows["size"] - shorter).astype(np.uint16), **fields)


def unpacked(batch, like):
    """Returns the sequences of a packed batch in order, padded like `like`."""
    padded = {name: np.zeros_like(x) for name, x in like.items()}
    number = 0
    for row, segments in enumerate(batch["segments"]):
        for slot in range(segments.max()):
            mask = segments == slot + 1
            start, size = batch["first_tokens"][row, slot], mask.sum()
            assert mask[start : start + size].all() and (batch["positions"][row, mask] == np.arange(size)).all()
            used = (batch["word_weights"][row] > 0) & mask[batch["word_positions"][row]]
            for name, values in padded.items():
                if name in ("pair_labels", "sequence_weights"):
                    values[number] = batch[name][row, slot]
                else:
                    packed_values = batch[name][row, used if name.startswith("word") else mask]
                    shift = {"word_positions": start, "segments": slot}.get(name, 0)
                    values[number, : len(packed_values)] = packed_values - np.array(shift, packed_values.dtype)
            number += 1
        assert not batch["sequence_weights"][row, segments.max() :].any()
        assert not any(batch[name][row, segments == 0].any() for name in ("input_ids", "positions"))
    assert number == len(like["segments"])
    return padded


def no_padding(batch):
    """Removes the values of padding, which a packed batch does not have."""
    inside, used = batch["segments"] > 0, batch["word_weights"] > 0
    tokens = {name: batch[name] * inside for name in ("input_ids", "token_types")}
    return {**batch, **tokens, **{name: batch[name] * used for name in ("word_positions", "word_ids")}}


def test_packed_and_padded_batches_have_the_same_sequences(packable):
    padded, packed = batches_of(packable, 20, batch_size=24), batches_of(packable, 20, batch_size=24, multiple=1)
    for batch, other in zip(padded, packed):
        assert_same([no_padding(batch)], [unpacked(other, batch)])
    assert len({len(batch["input_ids"]) for batch in packed}) == 1  # windows are epochs here
    tokens = sum((batch["segments"] > 0).sum() for batch in packed)
    assert tokens / sum(batch["segments"].size for batch in packed) > 0.8
    for multiple in (3, 8):
        for few, more in zip(packed[:5], batches_of(packable, 5, batch_size=24, multiple=multiple)):
            rows = len(few["input_ids"])
            assert len(more["input_ids"]) == -(-rows // multiple) * multiple and rows < 24
            assert_same([few], [{name: x[:rows] for name, x in more.items()}])
            assert not any(x[rows:].any() for x in more.values())
            used = few["segments"].any(1)
            assert len(set(few["dropout_rows"][used])) == used.sum()


def test_packed_batches_are_a_function_of_the_step(packable, monkeypatch):
    monkeypatch.setattr(order, "SHUFFLE_WINDOW", 3)  # several windows per epoch, which need not have the same rows
    monkeypatch.setattr(order, "FIRST_WINDOWS", 0)
    straight = batches_of(packable, 60, multiple=1)
    assert len({len(batch["input_ids"]) for batch in straight}) > 1
    for start in (1, 3, 5, 33):
        assert_same(straight[start:], batches_of(packable, 60 - start, start=start, multiple=1))
    changed = batches_of(packable, 5, seed=1, multiple=1)
    assert all(not np.array_equal(a["input_ids"], b["input_ids"]) for a, b in zip(straight, changed))


@pytest.mark.parametrize("together, hosts", [(2, 8), (4, 2), (4, 8), (100, 4)])
def test_hosts_share_the_same_packed_batches(packable, monkeypatch, together, hosts):
    monkeypatch.setattr(order, "SEQUENCES_PER_GROUP", together)  # groups: 8, 4, 1

    def of_host(host):
        share = lambda count: np.arange(host * count // hosts, (host + 1) * count // hosts)  # noqa: E731
        return batches_of(packable, 6, batch_size=16, start=7, multiple=8, rows=share)

    steps = zip(*map(of_host, range(hosts)))
    joined = [{name: np.concatenate([part[name] for part in step]) for name in step[0]} for step in steps]
    assert_same(batches_of(packable, 6, batch_size=16, start=7, multiple=8), joined)


def test_a_host_reads_only_the_groups_of_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(order, "SEQUENCES_PER_GROUP", 4)
    made = Order(measured_set(tmp_path), 16, 0, RowSize(LENGTH, 8, 8))
    lanes = [made.lanes_of(group) for group in range(4)]
    assert made.groups == 4 and sorted(lane for host_lanes in lanes for lane in host_lanes) == list(range(16))
    assert [*map(len, lanes)] == [4] * 4
    assert [made.groups_of(np.arange(host * 3, host * 3 + 3), 12).tolist() for host in range(4)] == [[0], [1], [2], [3]]
    assert made.groups_of(np.arange(3, 9), 12).tolist() == [1, 2]


def test_files_of_long_and_of_short_sequences_share_the_groups():
    lengths = np.repeat([512, 100], 50_000).astype(np.uint16)
    files = RecordSet(("long", "short"), (50_000, 50_000), lengths=lengths)
    made = Order(files, 1024, 0, ROW)
    needed = lengths.sum(dtype=int) / 512 / 100_000 * 1024
    assert made.groups == 8 and needed < made.rows(0, 8) < 1.05 * needed


def test_the_number_of_rows_is_nearly_constant(monkeypatch):
    """Each new number of rows is a compilation."""
    monkeypatch.setattr(order, "SHUFFLE_WINDOW", 32)
    lengths = rng().integers(8, 512, 40_000).astype(np.uint16)
    made = Order(RecordSet(("a",), (40_000,), lengths=lengths), 24, 0, ROW)
    row_counts = {made.arrangement(0, window).row_count for window in range(40)}
    assert len(row_counts) > 1 and len({made.rows(window * made.steps, 1) for window in range(40)}) <= 2


def test_skipped_records_leave_gaps(tmp_path):
    files = measured_set(tmp_path, count=120, on_corrupt="skip")
    whole = batches_of(files, 15, multiple=1)
    damage("flip", files.paths[1], 11)
    gone = 0
    for batch, before in zip(batches_of(files, 15, multiple=1), whole):
        kept = batch["segments"] > 0
        assert (batch["input_ids"][kept] == before["input_ids"][kept]).all()
        gone += (before["sequence_weights"] - batch["sequence_weights"]).sum()
    assert gone == 1


def test_wrong_stored_lengths_are_detected(tmp_path):
    with pytest.raises(UserError, match="the records are longer than when their lengths were read"):
        batches_of(measured_set(tmp_path, shorter=1), 15, multiple=1)


def test_a_row_with_too_many_masked_tokens_is_refused(tmp_path):
    message = (
        r"config.packing = True: a row has \d+ predicted words, but the limit is 3; set config.data.masked_lm_prob"
    )
    with pytest.raises(UserError, match=message):
        batches_of(measured_set(tmp_path), 20, multiple=1, transforms=[masks(MASKING)], row=RowSize(LENGTH, 8, 3))
