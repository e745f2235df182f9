"""Batches of tokenized examples: every one as often as it should be, and little padding."""

import numpy as np
import pytest

from bertjax.data.examples import BUCKETS, WINDOW, Examples, TrainingOrder, bucket, evaluation_batches


def make_examples(count, longest=100, seed=0, **fields):
    """Example i is made of the id i + 1."""
    lengths = np.random.default_rng(seed).integers(3, longest + 1, count)
    ids = [np.full(n, i + 1) for i, n in enumerate(lengths)]
    return Examples(ids, [np.arange(len(x)) % 2 for x in ids], **fields)


@pytest.mark.parametrize("count, batch_size, epochs", [(100, 8, 3), (7, 4, 2), (5, 4, 40), (64, 16, 1)])
def test_every_epoch_holds_every_example_once(count, batch_size, epochs):
    examples = make_examples(count)
    order = TrainingOrder(examples, batch_size, int(count * epochs / batch_size), seed=1, longest=128)
    seen = np.concatenate([order.rows(step) for step in range(order.total_steps)])
    times = np.bincount(seen, minlength=count)
    assert times.max() <= epochs and times.sum() == order.total_steps * batch_size
    if count * epochs % batch_size == 0:
        assert (times == epochs).all()
    # Nobody is seen twice before others are seen once, but for the windows that two epochs share.
    first = np.bincount(seen[: count // (WINDOW * batch_size) * WINDOW * batch_size], minlength=count)
    assert first.max() <= 1


def test_any_step_can_be_computed_by_itself_and_the_seed_decides():
    examples = make_examples(300)
    order = TrainingOrder(examples, 8, 112, seed=1, longest=128)
    all_steps = [order.rows(step) for step in range(order.total_steps)]
    for step in (100, 3, 41, 111):
        again = TrainingOrder(examples, 8, 112, seed=1, longest=128)
        np.testing.assert_array_equal(again.rows(step), all_steps[step])
        batch = next(again.batches(step, np.array([1, 5])))
        np.testing.assert_array_equal(batch["input_ids"][:, 0], all_steps[step][[1, 5]] + 1)
    other = TrainingOrder(examples, 8, 112, seed=2, longest=128)
    assert any((other.rows(step) != all_steps[step]).any() for step in range(5))


def test_short_examples_do_not_pay_for_long_ones():
    examples = make_examples(2000, longest=500)
    order = TrainingOrder(examples, 16, 125, seed=0, longest=512)
    padded = sum(16 * order.length(step) for step in range(order.total_steps))
    assert {order.length(step) for step in range(order.total_steps)} <= set(BUCKETS)
    assert padded < 1.35 * examples.lengths.sum()
    # The order is still random: neighbours are not of rising length.
    lengths = [order.length(step) for step in range(order.total_steps)]
    assert abs(np.corrcoef(np.arange(len(lengths)), lengths)[0, 1]) < 0.3


def test_evaluation_counts_nobody_twice_and_loses_nobody():
    examples = make_examples(45, labels=np.arange(45))
    seen = []
    for rows, length in evaluation_batches(examples, 8, 128):
        batch = examples.batch(rows, length)
        assert batch["input_ids"].shape == (8, length)
        for host in range(4):  # the last batch has nothing for some of them
            own = slice(2 * host, 2 * host + 2)
            for name, part in examples.batch(rows[own], length).items():
                np.testing.assert_array_equal(part, batch[name][own])
        real = batch["weights"] > 0
        assert not batch["input_mask"][~real].any()
        np.testing.assert_array_equal(batch["labels"][real], rows[real])
        np.testing.assert_array_equal(batch["input_ids"][real, 0], rows[real] + 1)
        np.testing.assert_array_equal(batch["input_mask"].sum(1)[real], examples.lengths[rows[real]])
        seen.extend(rows[real])
    assert sorted(seen) == list(range(45))


def test_a_batch_pads_ids_labels_and_choices():
    ids = [np.array([7, 8, 9]), np.array([5]), np.array([1, 2]), np.array([3])]
    types = [np.zeros_like(x) for x in ids]
    tagged = Examples(ids, types, [np.array([0, -1, 2]), [1], [-1, 3], [0]], per_token=True).batch(
        np.array([0, 2, -1]), 4
    )
    np.testing.assert_array_equal(tagged["labels"][:2], [[0, 0, 2, 0], [0, 3, 0, 0]])
    np.testing.assert_array_equal(tagged["weights"], [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]])
    choice = Examples(ids, types, np.array([1, 0]), choices=2)
    assert len(choice) == 2 and list(choice.lengths) == [3, 2]
    batch = choice.batch(np.array([1]), 3)
    np.testing.assert_array_equal(batch["input_ids"], [[[1, 2, 0], [3, 0, 0]]])
    np.testing.assert_array_equal(batch["input_mask"], [[[1, 1, 0], [1, 0, 0]]])
    scored = Examples(ids, types, np.array([0.5, 1, 2, 3])).batch(np.array([3, 0]), 3)
    assert scored["labels"].dtype == np.float32 and list(scored["labels"]) == [3, 0.5]


def test_buckets():
    assert [bucket(n, 128) for n in (1, 16, 17, 100, 128)] == [16, 16, 32, 128, 128]
    assert bucket(70, 80) == 80 and bucket(600, 1024) == 1024
