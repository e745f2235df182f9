"""Batches of tokenized examples: every example with the right frequency, and little padding."""

import itertools

import numpy as np
import pytest

from bertjax.data.batch import RowSize
from bertjax.data.loading import evaluation
from bertjax.data.loading import examples as batching
from bertjax.data.loading.examples import Examples, PackedOrder, TokenOrder, TrainingOrder, padded_length


def make_examples(count, longest=100, seed=0, **fields):
    """Makes examples; example i consists of the id i + 1."""
    lengths = np.random.default_rng(seed).integers(3, longest + 1, count)
    ids = [np.full(n, i + 1) for i, n in enumerate(lengths)]
    return Examples(ids, [np.arange(len(x)) % 2 for x in ids], **fields)


# 5 in batches of 16: fewer examples than a batch has rows. 1000 in batches of 8: several windows an epoch.
@pytest.mark.parametrize("count, batch_size", [(64, 16), (200, 32), (7, 4), (5, 16), (1000, 8)])
def test_every_epoch_holds_every_example_once(count, batch_size):
    order = TrainingOrder(make_examples(count), batch_size, seed=1, longest=128)
    assert order.steps_per_epoch == -(-count // batch_size)
    epochs = np.array([order.rows(step) for step in range(4 * order.steps_per_epoch)]).reshape(4, -1, batch_size)
    for epoch in epochs:
        assert np.sort(epoch[epoch >= 0]).tolist() == list(range(count))
        padding = (epoch < 0).sum(1)
        assert set(padding) <= {0, -count % batch_size} and np.count_nonzero(padding) <= 1
        in_place = (np.arange(order.steps_per_epoch) // order.window_steps)[padding > 0]
        assert (in_place == (order.steps_per_epoch - 1) // order.window_steps).all()  # the last window of the epoch
    if order.steps_per_epoch >= 4:  # batches combine other examples, not the same batches in another order
        assert len({frozenset(frozenset(rows) for rows in epoch.tolist()) for epoch in epochs}) == 4


@pytest.mark.parametrize(
    "order_of, count", [(TrainingOrder, 301), (TrainingOrder, 19), (PackedOrder, 301), (TokenOrder, 301)]
)
def test_batches_are_a_function_of_step_and_seed_for_any_number_of_hosts(order_of, count):
    """Reads nearly three epochs. With 19 examples, all rows of some hosts are padding of the same length."""
    examples = make_examples(count, labels=np.arange(count))

    def batches(steps, rows=np.arange, seed=1):
        extra = {} if order_of is TrainingOrder else dict(multiple=4)
        return list(order_of(examples, 8, seed, 128, **extra).batches(steps, rows))

    def quarter(host):
        return lambda count: np.arange(host * count // 4, (host + 1) * count // 4)

    straight = batches(range(112))
    for step in (2, 3, 41, 111):
        parts = [batches(range(step, step + 1), quarter(host))[0] for host in range(4)]
        for name, values in straight[step].items():
            np.testing.assert_array_equal(batches(range(step, step + 1))[0][name], values)
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), values)
    assert any(a["labels"].tolist() != b["labels"].tolist() for a, b in zip(straight, batches(range(5), seed=2)))
    if order_of is TrainingOrder:
        order = order_of(examples, 8, 1, longest=128)
        assert order.rows(10**9).shape == (8,)  # sampled at once
        for step, batch in enumerate(straight):
            rows = order.rows(step)
            np.testing.assert_array_equal(batch["weights"], rows >= 0)
            np.testing.assert_array_equal(batch["labels"][rows >= 0], rows[rows >= 0])
            assert batch["segments"].shape[1] == padded_length(batch["segments"].sum(1).max(), 128)


def test_batches_have_examples_of_similar_length():
    examples = make_examples(2000, longest=500)
    order = TrainingOrder(examples, 16, seed=0, longest=512)
    lengths = np.array([order.length(step) for step in range(4 * order.steps_per_epoch)])
    assert set(lengths) <= set(batching.LENGTHS)
    assert 16 * lengths.sum() < 1.35 * 4 * examples.lengths.sum()
    # The order stays random: lengths do not rise within a window.
    place = np.arange(len(lengths)) % order.steps_per_epoch % order.window_steps
    assert abs(np.corrcoef(place, lengths)[0, 1]) < 0.2


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("count, batch_size, multiple", [(600, 12, 1), (601, 12, 4), (40, 2, 1), (5, 8, 2)])
def test_batches_of_equal_tokens_hold_every_example_once(count, batch_size, multiple, packs):
    lengths = np.random.default_rng(0).permutation(np.where(np.arange(count) % 3, 12, 120))
    ids = [np.full(length, number + 1) for number, length in enumerate(lengths)]
    examples = Examples(ids, ids, labels=np.arange(count), equal_tokens=True)
    order = examples.make_order(batch_size, 1, 128, multiple, packs)
    steps, shapes, epochs = order.steps_per_epoch, set(), []
    assert steps == -(-count // batch_size)
    for epoch in range(2):
        seen, tokens, sizes = [], [], []
        for batch in order.batches(range(epoch * steps, (epoch + 1) * steps), np.arange):
            rows, length = batch["input_ids"].shape
            shapes.add((rows, length))
            assert rows % multiple == 0
            labels = batch["labels"][batch["weights"] > 0].tolist()
            assert labels
            seen += labels
            sizes.append(len(labels))
            tokens.append((batch["input_ids"] > 0).sum() if packs else len(labels) * length)
        assert sorted(seen) == list(range(count))
        epochs.append(seen)
        if count >= 600:
            assert max(tokens) < 1.6 * np.mean(tokens)  # the last window of an epoch has only two batches
            assert packs or max(sizes) > 4 * min(sizes)  # of short and of long examples
    assert steps < 4 or epochs[0] != epochs[1]
    assert {order.shape(step) for step in range(2 * steps)} == shapes
    assert len(shapes) <= 10


def test_evaluation_counts_every_example_once():
    examples, seen = make_examples(45, labels=np.arange(45)), []
    for rows, length in evaluation.evaluation_batches(examples, 8, 128):
        batch = examples.batch(rows, length)
        for host in range(4):  # some hosts have no examples in the last batch
            host_rows = slice(2 * host, 2 * host + 2)
            for name, part in examples.batch(rows[host_rows], length).items():
                np.testing.assert_array_equal(part, batch[name][host_rows])
        real = batch["weights"] > 0
        assert batch["input_ids"].shape == (8, length) and not batch["segments"][~real].any()
        np.testing.assert_array_equal(batch["labels"][real], rows[real])
        np.testing.assert_array_equal(batch["input_ids"][real, 0], rows[real] + 1)
        np.testing.assert_array_equal(batch["segments"].sum(1)[real], examples.lengths[rows[real]])
        seen.extend(rows[real])
    assert sorted(seen) == list(range(45))
    assert not list(evaluation.evaluation_batches(Examples([], []), 8, 128))


IDS = [np.array([7, 8, 9]), np.array([5]), np.array([1, 2]), np.array([3])]
TYPES = [np.zeros_like(x) for x in IDS]
TAGGED = Examples(IDS, TYPES, [np.array([0, -1, 2]), [1], [-1, 3], [0]], per_token=True)
CHOICES = Examples(IDS, TYPES, np.array([1, 0]), choices=2)


def listed(batch, *names):
    return [batch[name].tolist() for name in names]


def test_a_batch_pads_ids_labels_and_choices():
    labels, weights = listed(TAGGED.batch(np.array([0, 2, -1]), 4), "labels", "weights")
    assert labels[:2] == [[0, 0, 2, 0], [0, 3, 0, 0]]
    assert weights == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert len(CHOICES) == 2 and list(CHOICES.lengths) == [3, 2]
    ids, segments = listed(CHOICES.batch(np.array([1]), 3), "input_ids", "segments")
    assert (ids, segments) == ([[[1, 2, 0], [3, 0, 0]]], [[[1, 1, 0], [1, 0, 0]]])
    scored = Examples(IDS, TYPES, np.array([0.5, 1, 2, 3])).batch(np.array([3, 0]), 3)
    assert scored["labels"].dtype == np.float32 and list(scored["labels"]) == [3, 0.5]


def test_padded_lengths_are_powers_of_two_up_to_the_maximum():
    assert [padded_length(n, 128) for n in (1, 16, 17, 100, 128)] == [16, 16, 32, 128, 128]
    assert padded_length(70, 80) == 80 and padded_length(600, 1024) == 1024


# Packed batches.


def found_in(batch):
    """Returns the ids, types and position of each example of a packed batch of `make_examples`."""
    for row, slots in enumerate(batch["weights"]):
        for slot in np.flatnonzero(slots):
            inside = batch["segments"][row] == slot + 1
            start = batch["first_tokens"][row, slot]
            assert inside[start : start + inside.sum()].all()
            assert (batch["positions"][row, inside] == np.arange(inside.sum())).all()
            assert (batch["token_types"][row, inside] == np.arange(inside.sum()) % 2).all()
            yield row, slot, batch["input_ids"][row, inside]


@pytest.mark.parametrize("count, batch_size", [(64, 16), (203, 32), (7, 4), (5, 16), (1000, 8)])
def test_every_epoch_packs_every_example_once(count, batch_size):
    examples = make_examples(count, labels=np.arange(count))
    order = PackedOrder(examples, batch_size, seed=1, longest=128, multiple=2)
    epochs = []
    for epoch in range(3):
        first, seen = epoch * order.steps_per_epoch, []
        steps = range(first, first + order.steps_per_epoch)
        for step, batch in zip(steps, order.batches(steps, np.arange), strict=True):
            assert batch["input_ids"].shape == order.shape(step) and order.shape(step)[0] % 2 == 0
            packed_examples = list(found_in(batch))
            seen.append([ids[0] - 1 for _, _, ids in packed_examples])
            for row, slot, ids in packed_examples:
                assert set(ids) == {batch["labels"][row, slot] + 1} and len(ids) == examples.lengths[ids[0] - 1]
        assert sorted(itertools.chain.from_iterable(seen)) == list(range(count))
        assert sum(len(step) != batch_size for step in seen) <= 1
        epochs.append(seen)
    assert order.steps_per_epoch <= 2 or epochs[0] != epochs[1] != epochs[2]


def test_short_examples_share_rows():
    examples = make_examples(4000, longest=30)
    order = PackedOrder(examples, 32, seed=0, longest=512, multiple=1)
    rows, length = order.shape(0)
    assert rows * length < 1.06 * 32 * examples.lengths.mean()
    assert length <= 128  # longer rows cost more attention and save nothing


@pytest.mark.parametrize("batch_size, multiple", [(8, 1), (8, 4), (64, 8)])
def test_packed_evaluation_counts_every_example_once(batch_size, multiple):
    examples, seen, shapes = make_examples(45, labels=np.arange(45)), [], set()
    for packed_batch, *places in evaluation.packed_evaluation(examples, batch_size, 128, multiple):
        batch = examples.packed(packed_batch, *places)
        assert [ids[0] - 1 for _, _, ids in found_in(batch)] == packed_batch.tolist()
        seen += packed_batch.tolist()
        shapes.add(batch["input_ids"].shape)
    assert sorted(seen) == list(range(45)) and len(shapes) == 1 and shapes.pop()[0] % multiple == 0
    assert not list(evaluation.packed_evaluation(Examples([], []), batch_size, 128, multiple))


@pytest.mark.parametrize(
    "count, length, computed",
    [
        (16, 130, 2 * 8 * 192),  # not two batches of the 11 rows that a batch has at most
        (9, 130, 11 * 192),
        (25, 18, 4 * 128),  # not 8 rows of another length with much padding
        (1, 5, 16),
        (1, 600, 640),
    ],
)
def test_packed_evaluation_computes_few_tokens_of_padding(count, length, computed):
    ids = [np.ones(length, np.int32)] * count
    batches = list(evaluation.packed_evaluation(Examples(ids, ids), 32, 1000, 1))
    assert sum(row_count * row.tokens for *_, row_count, row in batches) == computed


def test_packed_evaluation_has_few_shapes():
    shapes = set()
    for seed in range(200):
        count, longest = np.random.default_rng(seed).integers([1, 3], [33, 40])
        for *_, row_count, row in evaluation.packed_evaluation(make_examples(count, longest, seed), 32, 512, 1):
            shapes.add((row_count, row))
    assert len(shapes) <= 30


def test_packed_batches_have_labels_and_choices():
    order, starts = (np.array([0, 2, -1, 1]), np.array([0, 0, 0, 1])), np.array([0, 3, 0, 0])
    row = RowSize(6, 3)
    assert listed(TAGGED.packed(*order, starts, 3, row), "input_ids", "labels", "weights") == [
        [[7, 8, 9, 1, 2, 0], [5, 0, 0, 0, 0, 0], [0] * 6],
        [[0, 0, 2, 0, 3, 0], [1, 0, 0, 0, 0, 0], [0] * 6],
        [[1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0], [0] * 6],
    ]
    assert CHOICES.tokens.tolist() == [4, 3]
    batch = CHOICES.packed(np.array([0, 1]), np.array([0, 1]), np.array([0, 0]), 2, row)
    assert listed(batch, "input_ids", "segments", "first_tokens", "labels", "weights") == [
        [[7, 8, 9, 5, 0, 0], [1, 2, 3, 0, 0, 0]],
        [[1, 1, 1, 2, 0, 0], [1, 1, 2, 0, 0, 0]],
        [[[0, 3], [0, 0], [0, 0]], [[0, 2], [0, 0], [0, 0]]],
        [[1, 0, 0], [0, 0, 0]],
        [[1, 0, 0]] * 2,
    ]
    spans = Examples(IDS, TYPES, np.array([[0, 1], [0, 0], [1, 1], [0, 0]])).packed(*order, starts, 3, row)
    assert spans["labels"].tolist() == [[[0, 1], [1, 1], [0, 0]], [[0, 0]] * 3, [[0, 0]] * 3]
    scored = Examples(IDS, TYPES, [1, 0.5, 2, 3]).packed(*order, starts, 3, row)  # the first label could be a class
    assert scored["labels"].dtype == np.float32
    assert [scored["labels"][at].tolist() for at in ((0, 0), (0, 1), (1, 0))] == [1, 2, 0.5]
