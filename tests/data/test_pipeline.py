"""The batch of a step: a function of (seed, step, records), the same for any number of hosts."""

import itertools

import numpy as np
import pytest

from bertjax.config import UserError
from bertjax.data import pipeline, records
from bertjax.data.records import RecordSet
from bertjax.data.tf import tf
from tests.data.test_records import GOOGLE, google_example


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


def numbers(files, steps, start=0, batch_size=16, seed=0, rows=None):
    batches = pipeline.train_batches(files, 8, 2, batch_size=batch_size, seed=seed, start=start, rows=rows)
    return np.array([batch["input_ids"][:, 1] for batch in itertools.islice(batches, steps)])


def test_any_step_can_be_computed_by_itself(numbered):
    straight = numbers(numbered, 90)
    for start in (1, 17, 18, 19, 60, 89):
        assert (numbers(numbered, 90 - start, start) == straight[start:]).all()
    assert (numbers(numbered, 90) == straight).all()
    assert (numbers(numbered, 5, seed=1) != straight[:5]).any()


@pytest.mark.parametrize("rows", [range(4), range(12, 16), [0, 1, 6, 7], [3], range(1, 16, 2)])
@pytest.mark.parametrize("lanes", [16, 4])
def test_hosts_share_the_same_global_batches(numbered, monkeypatch, rows, lanes):
    """Also where a host's rows do not lie side by side, or are half a lane's."""
    monkeypatch.setattr(pipeline, "MAX_LANES", lanes)
    together = numbers(numbered, 60, start=7)
    assert (numbers(numbered, 60, 7, rows=np.array(rows)) == together[:, np.array(rows)]).all()


def test_each_record_comes_once_an_epoch(numbered):
    total, lanes = numbered.total, 4
    steps = total // lanes
    for epoch in range(3):
        seen = numbers(numbered, steps, start=epoch * steps, batch_size=lanes)
        assert len(set(seen.ravel())) == total
    first, second = numbers(numbered, steps, batch_size=4), numbers(numbered, steps, start=steps, batch_size=4)
    assert (first != second).any()


def test_small_windows_shuffle_and_jump_alike(numbered, monkeypatch):
    monkeypatch.setattr(pipeline, "SHUFFLE_WINDOW", 6)
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
                spans = pipeline.lane_spans(files, lane, 16, seed=0, start=0)
                taken = 0
                while taken < 5 * 400:  # five epochs
                    path, _, count = next(spans)
                    mine.add(path)
                    taken += count
            opened.append(mine)
        assert all(len(mine) == 64 // hosts for mine in opened)
        assert len(set.union(*opened)) == 64


def test_a_late_step_is_the_one_that_training_reaches(records_folder):
    found = records.find_records(records_folder, 32, 5, "train")
    batches = pipeline.train_batches(found, 32, 5, batch_size=16, seed=0)
    reached = next(itertools.islice(batches, 2000, None))
    computed = next(pipeline.train_batches(found, 32, 5, batch_size=16, seed=0, start=2000))
    for name in reached:
        np.testing.assert_array_equal(computed[name], reached[name])


def test_a_late_step_is_computed_and_nothing_before_it_is_read(numbered, monkeypatch):
    """Step 50,000 is in epoch 666 of these 300 records, but a lane reads its window of 75, and a few ahead."""
    taken, lane_spans = [], pipeline.lane_spans

    def spy(*arguments):
        for span in lane_spans(*arguments):
            taken.append(span[2])
            yield span

    monkeypatch.setattr(pipeline, "lane_spans", spy)
    numbers(numbered, 1, start=50_000, batch_size=4)
    assert 300 <= sum(taken) <= 1200


def test_where_a_late_step_is_in_large_files():
    """Step 500,000 of 100 files of a million records each, none of which exist: its place is that of all before it."""
    files, size, start = RecordSet(tuple(f"shard-{i}" for i in range(100)), (1_000_000,) * 100), 4096, 500_000 * 4
    window = start // size
    for lane in (0, 1, 33, 63):
        before, spans = window * size, pipeline.lane_spans(files, lane, 64, seed=0, start=0)
        path, first, count = next(spans)
        while count <= before:
            before -= count
            path, first, count = next(spans)
        late = next(pipeline.lane_spans(files, lane, 64, seed=0, start=start))
        assert late == (path, first + before, count - before)
        orders = pipeline.window_orders(files, lane, 64, seed=0, start=0)
        late = next(pipeline.window_orders(files, lane, 64, seed=0, start=start))
        np.testing.assert_array_equal(late, next(itertools.islice(orders, window, None)))


def test_held_out_batches_go_through_once_on_any_number_of_hosts(numbered):
    def batches(rows=None):
        return list(pipeline.heldout_batches(numbered, 8, 2, batch_size=16, max_sequences=250, rows=rows))

    together = batches()
    ids = np.concatenate([b["input_ids"][:, 1] for b in together])
    weights = np.concatenate([b["next_sentence_weights"] for b in together])
    assert ids[weights > 0].tolist() == list(range(250)) and len(ids) == 256
    parts = [batches(np.arange(h * 4, h * 4 + 4)) for h in range(4)]
    for number, batch in enumerate(together):
        for name in batch:
            assert (np.concatenate([p[number][name] for p in parts]) == batch[name]).all()


def test_what_does_not_fit_together_is_refused(numbered):
    few = RecordSet(numbered.paths[1:2], numbered.counts[1:2])
    with pytest.raises(UserError, match=r"5 training records are too few for config.batch_size = 16"):
        numbers(few, 1)


def test_a_file_that_is_damaged_on_the_way_is_named(numbered, tmp_path):
    path = tmp_path / "cut.tfrecord"
    path.write_bytes(open(numbered.paths[0], "rb").read()[:-20])
    with pytest.raises(UserError, match="a record cannot be read"):
        numbers(RecordSet((str(path),), (37,)), 9)
