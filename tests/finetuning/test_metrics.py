"""The scores of the tasks compared with scikit-learn, SciPy, seqeval, SQuAD's scripts, brute force, and hand
computation.
"""

import gzip
import json
import math
import pathlib
import random

import numpy as np
import pytest
import scipy.special
import scipy.stats
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

from bertjax.finetuning import metrics

# Warnings of the other libraries about undefined scores.
pytestmark = pytest.mark.filterwarnings("ignore")


def random_classes(rng, classes):
    """Random labels and predictions, often equal, often without some classes."""
    n = rng.integers(1, 30)
    labels, predictions = (rng.choice(classes[: rng.integers(1, len(classes) + 1)], n) for _ in range(2))
    return labels, np.where(rng.random(n) < rng.choice([0, 0.5, 1]), labels, predictions)


def test_class_scores_equal_scikit_learn():
    import sklearn.metrics  # takes two seconds

    rng = np.random.default_rng(0)
    for i in range(60):  # a call of scikit-learn takes milliseconds
        labels, predictions = random_classes(rng, rng.permutation(2 if i % 2 else 5))
        expected = sklearn.metrics.matthews_corrcoef(labels, predictions)
        assert metrics.matthews(labels, predictions) == pytest.approx(expected, abs=1e-12)
        expected = sklearn.metrics.accuracy_score(labels, predictions)
        assert metrics.accuracy(labels, predictions) == pytest.approx(expected)
        expected = sklearn.metrics.f1_score(labels, predictions, average="macro", zero_division=0)
        assert metrics.macro_f1(labels, predictions) == pytest.approx(expected)
    assert metrics.f1(["yes", "no"], ["yes", "yes"], positive="yes") == pytest.approx(2 / 3)
    for n in range(1, 30):  # a hundred cases in one call, as the classes of a multi-label problem
        labels, predictions = rng.random((2, n, 100)) < rng.choice([0, 0.1, 0.5, 1], (2, 1, 100))
        expected = sklearn.metrics.f1_score(labels, predictions, average=None, zero_division=0)
        scores = [metrics.f1(labels[:, i], predictions[:, i]) for i in range(100)]
        np.testing.assert_allclose(scores, expected)
        inverse = [metrics.f1(1 - labels[:, i], 1 - predictions[:, i], positive=0) for i in range(100)]
        np.testing.assert_allclose(inverse, expected)


def test_multi_label_scores_equal_scikit_learn():
    import sklearn.metrics  # takes two seconds

    rng = np.random.default_rng(0)
    for n in range(1, 60):
        labels, predictions = rng.random((2, n, 7)) < rng.choice([0, 0.1, 0.5], (2, 1, 7))
        scores = metrics.f1_of_labels(labels, predictions)
        for average in ("micro", "macro"):
            expected = sklearn.metrics.f1_score(labels, predictions, average=average, zero_division=0)
            assert scores[f"{average}_f1"] == pytest.approx(expected)
    with pytest.raises(ValueError, match="labels and"):
        metrics.f1_of_labels(labels, predictions[:, :3])


def test_the_tuned_threshold_is_optimal():
    rng = np.random.default_rng(0)
    for n in range(1, 40):
        labels = rng.random((n, 3)) < rng.choice([0.1, 0.5])
        chances = np.round(np.where(labels, rng.random((n, 3)), rng.random((n, 3)) ** 2), 2)  # some are equal
        threshold = metrics.best_threshold(labels, chances)
        scores = {t: metrics.f1_of_labels(labels, chances > t)["micro_f1"] for t in np.linspace(-0.005, 1.005, 102)}
        assert metrics.f1_of_labels(labels, chances > threshold)["micro_f1"] == pytest.approx(max(scores.values()))
        assert threshold not in chances.ravel()
    assert metrics.best_threshold([[True, False]], [[0.9, 0.05]]) == pytest.approx(0.475)
    assert metrics.best_threshold([[False, False]], [[0.9, 0.3]]) == pytest.approx(0.6)  # no label is right


def test_probabilities_equal_scipy():
    rng = np.random.default_rng(0)
    for logits in (rng.normal(size=(20, 7)).astype(np.float32), [1000.0, 0.0, -1000.0]):
        np.testing.assert_allclose(metrics.sigmoid(logits), scipy.special.expit(np.asarray(logits, np.float64)))
    for logits in (*rng.normal(size=(20, 7)).astype(np.float32), [1000.0, 0.0, -1000.0], [3.0]):
        np.testing.assert_array_equal(metrics.softmax(logits), scipy.special.softmax(logits))


def test_matthews_correlation_of_many_examples_does_not_overflow():
    """200,000 examples, whose fourth power exceeds int64."""
    labels = np.arange(200_000) % 2
    predictions = np.where(np.arange(200_000) % 8 < 2, 1 - labels, labels)
    assert metrics.matthews(labels, predictions) == pytest.approx(0.5)


def test_correlations_equal_scipy():
    rng = np.random.default_rng(1)
    for i in range(300):
        n = rng.integers(2, 20)
        labels, scores = rng.integers(0, 5, n) / 5, rng.normal(size=n) * 10.0 ** rng.integers(-3, 4)
        if i % 2:
            scores = np.round(scores).astype(np.float32)
        for correlation, reference in (
            (metrics.pearson, scipy.stats.pearsonr),
            (metrics.spearman, scipy.stats.spearmanr),
        ):
            expected = reference(labels, scores.astype(np.float64)).statistic
            assert correlation(labels, scores) == pytest.approx(expected, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("correlation", [metrics.pearson, metrics.spearman])
def test_undefined_correlations_are_nan(correlation):
    tenths = [0.1, 0.1, 0.1]  # their mean is not 0.1
    for labels, scores in (([1, 2, 3], tenths), ([2, 2], [2, 2]), ([1], [1]), ([1, 2, 3], [1, math.nan, 2])):
        assert math.isnan(correlation(labels, scores)) and math.isnan(correlation(scores, labels))


@pytest.mark.parametrize("score", [metrics.accuracy, metrics.f1, metrics.matthews, metrics.pearson, metrics.spearman])
def test_empty_and_uneven_inputs_are_refused(score):
    with pytest.raises(ValueError, match="no examples to score"):
        score([], [])
    with pytest.raises(ValueError, match=r"\(2,\) and \(1,\)"):
        score([1, 0], [1])
    with pytest.raises(ValueError, match=r"\[n\]"):
        score([[1, 0]], [[1, 0]])


TAGS = ["O", "O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-a-b", "I-a-b"]


def test_entity_scores_equal_seqeval():
    rng = random.Random(1)
    for _ in range(1000):
        gold = [rng.choices(TAGS, k=rng.randrange(1, 8)) for _ in range(rng.randrange(1, 4))]
        predicted = [[tag if rng.random() < 0.8 else rng.choice(TAGS) for tag in tags] for tags in gold]
        micro = precision_recall_fscore_support(gold, predicted, average="micro", zero_division=0)[:3]
        by_type = precision_recall_fscore_support(gold, predicted, average=None, zero_division=0)[:3]
        assert tuple(metrics.entity_scores(gold, predicted).values()) == pytest.approx(micro)
        types = sorted({tag[2:] for tags in gold + predicted for tag in tags} - {""})
        scores_by_type = metrics.entity_scores_by_type(gold, predicted)
        assert list(scores_by_type) == types
        for type_, scores in zip(types, zip(*by_type)):
            assert tuple(scores_by_type[type_].values()) == pytest.approx(scores)


def test_entity_scores_of_empty_inputs_and_invalid_tags():
    nothing = dict(precision=0, recall=0, f1=0)
    assert metrics.entity_scores([["O"], []], [["O"], []]) == nothing
    assert metrics.entity_scores([["B-PER"]], [["O"]]) == metrics.entity_scores([["O"]], [["B-PER"]]) == nothing
    assert metrics.entity_scores_by_type([["O"]], [["O"]]) == {}
    with pytest.raises(ValueError, match="no examples to score"):
        metrics.entity_scores([], [])
    for tag in ("", "PER", "B", "I-", "E-PER", "O-PER", "b-PER", "[PAD]"):
        with pytest.raises(ValueError, match="O, B-type, I-type"):
            metrics.entities(["O", tag])
    for predicted in ([["O"]], [["O"], ["O", "O"]]):
        with pytest.raises(ValueError, match="same words"):
            metrics.entity_scores([["O"], ["O"]], predicted)


def test_squad_scores_equal_hand_computed_scores():
    golds = {"1": ["Denver Broncos"], "2": ["Denver", "Colorado"], "3": ["gold"], "4": ["blue"]}
    predictions = {"1": "Denver", "2": "the Colorado", "3": "silver", "another": "question"}
    # F1: 2/3, 1, 0, and 0 because a prediction is missing.
    assert metrics.squad_scores(golds, predictions) == pytest.approx(dict(exact_match=25, f1=125 / 3))
    golds |= {"5": [], "6": [], "7": [], "8": []}
    predictions |= {"5": "", "6": "a guess", "7": "The"}
    scores = dict(exact_match=300 / 8, f1=100 * (5 / 3 + 2) / 8, has_answer_exact_match=25, has_answer_f1=125 / 3)
    scores |= dict(no_answer_exact_match=50, no_answer_f1=50)
    assert metrics.squad_scores(golds, predictions) == pytest.approx(scores)
    scores = dict(exact_match=100, f1=100, no_answer_exact_match=100, no_answer_f1=100)
    assert metrics.squad_scores({"5": []}, {"5": ""}) == scores
    assert metrics.squad_scores({"5": [], "1": ["x"]}, {})["f1"] == 0
    of_articles = [metrics.squad_scores({"1": ["the"]}, {"1": "an"}, version)["f1"] for version in ("v1.1", "v2.0")]
    assert of_articles == [0, 100]
    with pytest.raises(ValueError, match="no examples to score"):
        metrics.squad_scores({}, {"1": "x"})


def test_the_null_threshold_may_reject_all_answers():
    threshold, f1, exact = metrics.best_null_threshold({"b": []}, {"b": "guess"}, {"b": -9.0})
    assert threshold < -9 and f1 == exact == 100
    # Questions with equal odds are kept together; a question without a prediction scores 0 at every threshold.
    odds = {"a": 1.0, "b": 1.0}
    assert metrics.best_null_threshold({"a": ["x"], "b": []}, {"a": "x", "b": "guess"}, odds)[1:] == (50, 50)
    assert metrics.best_null_threshold({"a": ["x"], "b": []}, {"a": "x"}, odds)[1:] == (50, 50)
    with pytest.raises(ValueError, match="no examples to score"):
        metrics.best_null_threshold({"b": []}, {}, {})


@pytest.fixture(scope="module")
def official():
    """Reads the scores of SQuAD's official scripts, see tests/golden/make_squad.py."""
    return json.loads(gzip.decompress((pathlib.Path(__file__).parents[1] / "golden/squad.json.gz").read_bytes()))


def test_squad_scores_equal_the_official_scripts(official):
    """The questions include hand-written ones: articles, punctuation, letters of other scripts."""
    assert len(official["questions"]) > 4000
    for golds, prediction, *expected in official["questions"]:
        versions = ("v1.1", "v2.0") if golds else ("v2.0",)
        scores = [score(golds, prediction, v) for v in versions for score in (metrics.exact_match, metrics.token_f1)]
        assert scores == pytest.approx(expected[-len(scores) :]), (golds, prediction)


def test_the_null_threshold_equals_the_official_script(official):
    """Except the threshold that rejects all answers, which is 0 in the script."""
    for golds, predictions, odds, best_exact, best_f1, best_threshold in official["searches"]:
        threshold, f1, exact = metrics.best_null_threshold(golds, predictions, odds)
        assert (f1, exact) == pytest.approx((best_f1, best_exact))
        if threshold >= min(odds.values()):
            assert threshold == best_threshold
