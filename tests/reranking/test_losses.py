"""Losses of rerankers. `interop/test_reranker_losses_parity.py` compares the values with sentence-transformers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.distributed.mesh import GROUPS
from bertjax.reranking import losses
from bertjax.reranking.losses import LOSSES, POINTWISE, SCHEMES

LENGTHS = (4, 1, 7, 2, 5, 3)
PLACES = 32  # of pairs in a batch
SETTINGS = dict(positive_weight=2.0, scale=10.0, scheme="ndcg_loss2++", k=3, sigma=1.5, mu=4.0, temperature=2.0)
CASES = {name: dict(name=name) for name in LOSSES if name != "lambda"} | {
    f"lambda {scheme}": dict(name="lambda", scheme=scheme) for scheme in SCHEMES
}


def made_loss(case, lists=8, documents=9):
    return losses.make_loss(ConfigDict(SETTINGS | CASES[case]), lists, documents)


def made_batch(lengths=LENGTHS, grades=None, seed=0):
    """Returns logits `[PLACES, 1]` and a batch: first the pairs of all lists, then places without a pair."""
    rng, count = np.random.default_rng(seed), sum(lengths)
    numbers = np.repeat(rng.permutation(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    grades = rng.integers(0, 4, count) if grades is None else np.full(count, grades)
    labels = np.zeros((PLACES, 3), np.float32)
    labels[:count] = np.stack([numbers, positions, grades], 1)
    weights = (np.arange(PLACES) < count).astype(np.float32)
    logits = rng.normal(size=(PLACES, 1)).astype(np.float32)
    return logits, {"labels": labels, "weights": weights}


@functools.partial(jax.jit, static_argnums=(0, 3))
def result(loss, logits, batch, groups=1):
    """Returns the loss of a batch, the share of correct pairs, and the gradient, as a training step computes them."""

    def mean(logits):
        parts = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), (logits, batch))
        losses_of_pairs, correct = jax.vmap(loss, axis_name=GROUPS)(*parts)
        weights = parts[1]["weights"] / jnp.maximum(batch["weights"].sum(), 1)
        return (weights * losses_of_pairs).sum(), (weights * correct).sum()

    (value, correct), gradient = jax.value_and_grad(mean, has_aux=True)(logits)
    return value, correct, gradient


def assert_same(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


@pytest.mark.parametrize("case", CASES)
def test_order_padding_groups_and_layout_do_not_change_the_result(case):
    loss, (logits, batch) = made_loss(case), made_batch()
    value, correct, gradient = result(loss, logits, batch)
    assert np.isfinite(value) and abs(value) > 1e-3 and 0 < correct < 1
    there = batch["weights"] > 0
    assert np.abs(gradient[there]).max() > 1e-3 and not gradient[~there].any()

    order = np.random.default_rng(1).permutation(PLACES)
    mixed = logits[order], jax.tree.map(lambda x: x[order], batch)
    assert_same(result(loss, *mixed), (value, correct, gradient[order]))
    sequences = jax.tree.map(lambda x: x.reshape(16, 2, *x.shape[1:]), mixed)
    assert_same(result(loss, *sequences, 8), (value, correct, gradient[order].reshape(16, 2, 1)))

    # Places without a pair can contain any numbers, also the number of a list.
    other_logits, other_labels = logits.copy(), batch["labels"].copy()
    other_logits[~there], other_labels[~there] = 1e4, batch["labels"][0]
    other = other_logits, batch | {"labels": other_labels}
    assert_same(result(loss, *other), (value, correct, gradient))


@pytest.mark.parametrize("case", ["list_mle", "lambda ndcg_loss2++"])
def test_sizes_above_the_sizes_of_the_batch_do_not_change_the_result(case):
    logits, batch = made_batch()
    exact = made_loss(case, len(LENGTHS), max(LENGTHS))
    assert_same(result(exact, logits, batch), result(made_loss(case), logits, batch))


@pytest.mark.parametrize("case", [case for case in CASES if case not in POINTWISE])
def test_each_pair_has_the_loss_of_the_batch(case):
    logits, batch = made_batch()
    loss = jax.jit(jax.vmap(made_loss(case), axis_name=GROUPS))
    values, correct = loss(*jax.tree.map(lambda x: x.reshape(4, 8, *x.shape[1:]), (logits, batch)))
    assert values.shape == correct.shape == (4, 8) and np.unique(values).size == 1


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "lengths, grade", [((3, 4), 0.0), ((3, 4), 1.0), ((1, 1), 1.0), ((1,), 0.0), ((), 0.0), ((9,), -3.0)]
)
def test_lists_with_one_grade_and_extreme_scores_have_finite_gradients(case, lengths, grade):
    lengths = lengths or (0,)
    logits, batch = made_batch(lengths, grade)
    for scores in (logits, np.zeros_like(logits), 1e4 * logits):
        value, _, gradient = result(made_loss(case), scores, batch)
        assert np.isfinite(value) and np.isfinite(gradient).all()
        # "ndcg_loss1" compares documents with equal grades, and each document with itself.
        compares_grades = case == "rank_net" or (case.startswith("lambda") and not case.endswith("loss1"))
        if not sum(lengths) or compares_grades or (case not in POINTWISE and max(lengths) == 1):
            assert not gradient.any() and (value == 0 or case.endswith("loss1"))


@pytest.mark.parametrize("case", [case for case in CASES if case not in POINTWISE])
def test_finite_differences_of_the_loss_equal_the_gradient(case):
    logits, batch = made_batch(seed=3)
    loss, direction = made_loss(case), np.random.default_rng(0).normal(size=logits.shape).astype(np.float32)
    (plus, _, _), (minus, _, _) = (result(loss, logits + sign * 1e-3 * direction, batch) for sign in (1, -1))
    _, _, gradient = result(loss, logits, batch)
    assert float(plus - minus) / 2e-3 == pytest.approx(float((gradient * direction).sum()), rel=2e-2, abs=2e-3)


def lambda_losses_of_list(scores, grades, scheme, k, sigma, mu):
    """Returns the losses of the compared pairs of documents, one by one as the paper defines them."""
    order = np.argsort(-scores, kind="stable")
    scores, grades = scores[order].astype(float), grades[order]
    gains, discounts = 2.0**grades - 1, np.log2(np.arange(2, 12))
    best = (np.sort(gains)[::-1][:k] / discounts[: len(gains)][:k]).sum()
    gains = gains / best if best else gains
    pairs = [(i, j) for i in range(len(scores)) for j in range(len(scores)) if min(i, j) < k]
    for i, j in pairs:
        bits = np.logaddexp(0, -sigma * (scores[i] - scores[j])) / np.log(2)
        if scheme == "ndcg_loss1":
            yield bits * gains[i] / discounts[i]
        elif grades[i] > grades[j]:
            distance = abs(i - j)
            tight = (1 / discounts[distance - 1] - 1 / discounts[distance]) * (gains[i] - gains[j])
            coarse = abs(1 / discounts[i] - 1 / discounts[j]) * (gains[i] - gains[j])
            weights = {"none": 1, "ndcg_loss2": tight, "lambda_rank": coarse, "ndcg_loss2++": mu * tight + coarse}
            yield bits * weights[scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lambda_losses_follow_the_paper(scheme):
    logits, batch = made_batch()
    lists = np.split(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)[:-1])
    expected = [
        loss
        for places in lists
        for loss in lambda_losses_of_list(logits[places, 0], batch["labels"][places, 2], scheme, 3, 1.5, 4.0)
    ]
    value, _, _ = result(made_loss(f"lambda {scheme}"), logits, batch)
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_training_with_the_loss_ranks_the_documents(case):
    _, batch = made_batch((4, 3), 0.0)
    batch["labels"][:7, 2] = [3, 2, 1, 0, 2, 1, 0] if case not in POINTWISE[:1] else [1, 0.6, 0.4, 0, 1, 0.5, 0]
    logits, loss = np.zeros((PLACES, 1), np.float32), made_loss(case)
    for _ in range(100):
        logits = logits - 0.3 * result(loss, logits, batch)[2]
    scores = logits[:7, 0]
    if case == "multiple_negatives":
        assert scores[0] > scores[1:4].max() + 0.1 and scores[4] > scores[5:].max() + 0.1
    else:
        assert (np.diff(scores)[[0, 1, 2, 4, 5]] < -0.05).all(), scores


def test_correct_lists_have_the_highest_score_at_the_highest_grade():
    labels = np.array([[0, 0, 1], [0, 1, 2], [1, 0, 3], [1, 1, 3], [1, 2, 0], [2, 0, 1], [2, 1, 0]], np.float32)
    batch = {"labels": labels, "weights": np.ones(7, np.float32)}
    logits = np.array([2.0, 1.0, 4.0, 4.0, 1.0, 3.0, 3.0], np.float32)[:, None]
    loss = losses.ListNet(lists=3, documents=3)
    _, correct = jax.vmap(loss, axis_name=GROUPS)(*jax.tree.map(lambda x: x[None], (logits, batch)))
    # A document of list 2 with a lower grade has the highest score, too.
    assert correct[0].tolist() == [False, False, True, True, True, False, False]


@pytest.mark.parametrize("name, expected", [("binary_cross_entropy", [1, 0, 1, 0]), ("mse", [0, 0, 1, 1])])
def test_correct_pairs_of_pointwise_losses(name, expected):
    labels = np.array([[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 3, 1]], np.float32)
    logits = np.array([3.0, 2.0, -0.4, -0.4 + 1], np.float32)[:, None]
    logits[3] = 0.6 if name == "mse" else -0.6
    _, correct = made_loss(name)(logits, {"labels": labels, "weights": np.ones(4, np.float32)})
    assert correct.tolist() == [bool(value) for value in expected]


def test_weights_of_places_follow_the_paper_also_in_long_lists():
    is_there = np.arange(400) < np.array([400, 5, 1, 0])[:, None]
    weights = losses.PositionAwareListMLE(4, 400).weights(is_there)
    expected = 2.0 ** (5 - np.arange(1, 6)) - 1
    np.testing.assert_allclose(weights[1, :5], expected / expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(weights[0, :20], 2.0 ** -np.arange(1, 21), rtol=1e-5)
    np.testing.assert_allclose(weights.sum(1), [1, 1, 0, 0], rtol=1e-5)


def test_large_grades_have_finite_gains():
    logits, batch = made_batch((3, 4), 0.0)
    batch["labels"][:7, 2] = [500, 0, 1, 1000, 999, 0, 5]
    for scheme in SCHEMES:
        value, _, gradient = result(made_loss(f"lambda {scheme}"), logits, batch)
        assert np.isfinite(value) and np.isfinite(gradient).all() and gradient.any()


def test_equal_settings_make_equal_losses():
    for case in CASES:
        assert made_loss(case) == made_loss(case) and hash(made_loss(case)) == hash(made_loss(case))
        if CASES[case]["name"] not in POINTWISE:
            assert made_loss(case) != made_loss(case, lists=9)
    assert losses.make_loss(ConfigDict(SETTINGS | dict(name="lambda", k=7)), 2, 3) == losses.LambdaLoss(
        2, 3, k=7, sigma=1.5, scheme="ndcg_loss2++", mu=4.0
    )
    assert made_loss("kl").temperature == 2 and made_loss("binary_cross_entropy").positive_weight == 2


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("name", "infonce", "config.loss.name = 'infonce': choose one of binary_cross_entropy, mse"),
        ("scheme", "ndcg", "config.loss.scheme = 'ndcg': choose one of none, ndcg_loss1"),
        ("k", -1, "config.loss.k = -1: must be 0 or more; set 0 to compare all documents of a list"),
        ("mu", -1.0, "config.loss.mu = -1.0: must be 0 or more and finite; set for example 10.0"),
        ("scale", 0.0, "config.loss.scale = 0.0: must be above 0 and finite; set for example 1.0"),
        ("sigma", float("nan"), "config.loss.sigma = nan: must be above 0"),
        ("temperature", float("inf"), "config.loss.temperature = inf: must be above 0 and finite"),
        ("positive_weight", -2.0, "config.loss.positive_weight = -2.0: must be above 0"),
    ],
)
def test_invalid_settings(field, value, message):
    config = ConfigDict({"loss": SETTINGS | {"name": "lambda"}})
    losses.validate_loss(config)
    config.loss[field] = value
    with pytest.raises(UserError) as error:
        losses.validate_loss(config)
    assert message in str(error.value)
