"""Metrics in NumPy: of GLUE, of entities (CoNLL), of answers (SQuAD), and of embeddings."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
Entity = tuple[int, str, int, int]  # (sentence, type, first word, end)


def softmax(logits: ArrayLike) -> np.ndarray:
    """Returns the probabilities [n] of logits [n]."""
    exponentials = np.exp(np.asarray(logits) - np.max(logits))  # Importing scipy.special takes long.
    return exponentials / exponentials.sum()


def comparable(vectors: ArrayLike, similarity: str) -> np.ndarray:
    """Returns vectors whose dot products are the similarities.

    Args:
      vectors: `[..., width]`.
      similarity: cosine or dot, as `similarity_fn_name` of sentence-transformers.
    """
    return l2_normalize(vectors) if similarity == "cosine" else np.asarray(vectors)


def l2_normalize(vectors: ArrayLike) -> np.ndarray:
    """Returns vectors [..., width] of length 1, in float32; a vector of length 0 does not change."""
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def accuracy(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns the fraction of predictions [n] that equal the labels [n], 0 to 1."""
    label_array, prediction_array = _pair(labels, predictions)
    return float((label_array == prediction_array).mean())


def f1(labels: ArrayLike, predictions: ArrayLike, positive: int = 1) -> float:
    """Returns the F1 of the class `positive`, 0 to 1, for labels and predictions [n]; 0.0 if both lack the class."""
    is_labelled, is_predicted = (array == positive for array in _pair(labels, predictions))
    return _f1((is_predicted & is_labelled).sum(), is_predicted.sum(), is_labelled.sum())


def macro_f1(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns the mean F1, 0 to 1, of the classes in labels or predictions [n]."""
    labelled, predicted, correct = _counts(*_pair(labels, predictions))
    return float((2 * correct / (labelled + predicted)).mean())


def _counts(labels: np.ndarray, predictions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the numbers of labels, predictions and correct predictions of each class, `[classes]`.

    The numbers are floats, because products of integers could overflow.
    """
    _, classes = np.unique(np.concatenate([labels, predictions]), return_inverse=True)
    label_classes, predicted_classes = np.split(classes.reshape(-1), 2)

    def count(numbers: np.ndarray) -> np.ndarray:
        return np.bincount(numbers, minlength=classes.max() + 1).astype(np.float64)

    correct = label_classes[label_classes == predicted_classes]
    return count(label_classes), count(predicted_classes), count(correct)


def sigmoid(logits: ArrayLike) -> np.ndarray:
    """Returns the sigmoid of logits, in float64, without an overflow."""
    return np.exp(-np.logaddexp(0, -np.asarray(logits, np.float64)))


def f1_of_labels(labels: ArrayLike, predictions: ArrayLike) -> dict[str, float]:
    """Returns the F1, 0 to 1, of labels that do not exclude each other: booleans [n, labels].

    "micro_f1" counts all labels together. "macro_f1" is the mean F1 of the labels. A label without examples and
    predictions has an F1 of 0.0, as in scikit-learn.
    """
    is_labelled, is_predicted = (np.asarray(side, bool) for side in (labels, predictions))
    if is_labelled.shape != is_predicted.shape or not len(is_labelled):
        raise ValueError(f"{is_labelled.shape} labels and {is_predicted.shape} predictions")
    counts = np.stack([(is_labelled & is_predicted).sum(0), is_predicted.sum(0), is_labelled.sum(0)])
    by_label = [_f1(*label_counts) for label_counts in counts.T]
    return {"micro_f1": _f1(*counts.sum(1)), "macro_f1": float(np.mean(by_label))}


def best_threshold(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """Returns the threshold of probabilities [n, labels] with the best micro F1.

    The threshold is the mean of two neighbouring probabilities. Of several best thresholds, the function returns the
    threshold nearest to 0.5.
    """
    is_labelled = np.asarray(labels, bool).ravel()
    order = np.argsort(-np.ravel(probabilities), kind="stable")
    falling = np.append(np.ravel(probabilities)[order], 0.0)
    correct, predicted = np.cumsum(is_labelled[order]), np.arange(1, len(order) + 1)
    scores = 2 * correct / (predicted + is_labelled.sum())  # F1 if the most likely labels are predicted
    scores[falling[:-1] == falling[1:]] = -1.0  # No threshold separates equal probabilities.
    middles = (falling[:-1] + falling[1:]) / 2
    best = middles[scores == scores.max()]
    return float(best[np.abs(best - 0.5).argmin()])


def matthews(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Returns Matthews' correlation, -1 to 1, of classes [n]; 0.0 if all labels or all predictions are equal.

    For more than two classes, the result is the R_K of Gorodkin (2004), as in scikit-learn.
    """
    labelled, predicted, correct = _counts(*_pair(labels, predictions))
    n = float(labelled.sum())
    spread = (n * n - float(labelled @ labelled)) * (n * n - float(predicted @ predicted))
    return (n * float(correct.sum()) - float(labelled @ predicted)) / spread**0.5 if spread else 0.0


def pearson(labels: ArrayLike, scores: ArrayLike) -> float:
    """Returns Pearson's correlation, -1 to 1, of numbers [n]; NaN, as in SciPy, if a side is constant or has a NaN."""
    pair = [x.astype(np.float64) for x in _pair(labels, scores)]
    # The mean is rounded, so that the difference of a constant and the mean can differ from 0.
    if any((x == x[0]).all() for x in pair):
        return float("nan")
    x, y = [(x - x.mean()) / np.linalg.norm(x - x.mean()) for x in pair]
    return float(np.clip(x @ y, -1, 1))


def spearman(labels: ArrayLike, scores: ArrayLike) -> float:
    """Returns Spearman's correlation, -1 to 1, of numbers [n]: the correlation of the ranks, see `pearson`.

    Equal numbers have the mean of the ranks.
    """
    return pearson(*(_ranks(x.astype(np.float64)) for x in _pair(labels, scores)))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return np.where(np.isnan(values), np.nan, ranks[indices])


def _pair(labels: ArrayLike, predictions: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Returns two arrays [n]. Raises `ValueError` for other shapes, and for n = 0."""
    label_array, prediction_array = np.asarray(labels), np.asarray(predictions)
    if label_array.ndim != 1 or label_array.shape != prediction_array.shape:
        raise ValueError(f"labels and predictions must both be [n]: {label_array.shape} and {prediction_array.shape}")
    if not len(label_array):
        raise ValueError("no examples to score; expected at least 1")
    return label_array, prediction_array


def _f1(correct: float, predicted: float, labelled: float) -> float:
    """Returns the F1, the harmonic mean of correct / predicted and correct / labelled.

    The F1 is 0.0 if `predicted` and `labelled` are 0.
    """
    return float(2 * correct / (predicted + labelled)) if predicted + labelled else 0.0


class Threshold(NamedTuple):
    """The lowest score of the examples that count as positive.

    Attributes:
      value: the score.
      best: the value of the metric with this threshold.
    """

    value: float
    best: float


def best_accuracy(labels: ArrayLike, scores: ArrayLike) -> Threshold:
    """Returns the highest threshold of scores [n] with the best accuracy for labels [n], 1 or 0.

    The threshold is the mean of two neighbouring scores, or is above all scores, as in the
    BinaryClassificationEvaluator of sentence-transformers.
    """
    thresholds, correct, predicted = _falling(labels, scores)
    negatives = predicted[-1] - correct[-1]
    return _best(thresholds, (correct + negatives - (predicted - correct)) / predicted[-1])


def best_f1(labels: ArrayLike, scores: ArrayLike) -> Threshold:
    """Returns the highest threshold with the best F1, see `best_accuracy`."""
    thresholds, correct, predicted = _falling(labels, scores)
    return _best(thresholds, 2 * correct / (predicted + correct[-1]))


def _best(thresholds: np.ndarray, values: np.ndarray) -> Threshold:
    best = values.argmax()
    return Threshold(float(thresholds[best]), float(values[best]))


def average_precision(labels: ArrayLike, scores: ArrayLike) -> float:
    """Returns the average precision, 0 to 1: the mean of the precisions at the positive labels.

    The examples are sorted by falling score. Examples with equal scores have the same precision, as in scikit-learn.

    Args:
      labels: `[n]`, 1 or 0; at least one label must be 1.
      scores: `[n]`.
    """
    _, correct, predicted = _falling(labels, scores)
    return float((np.diff(correct) * correct[1:] / predicted[1:]).sum() / correct[-1])


def _falling(labels: ArrayLike, scores: ArrayLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns falling thresholds, and for each threshold the numbers of true positives and of predicted positives.

    The first threshold is above all scores.
    """
    label_array, score_array = _pair(labels, scores)
    order = np.argsort(-score_array, kind="stable")
    falling = score_array[order]
    last = np.append(falling[1:] != falling[:-1], True)  # Examples with equal scores have the same prediction.
    ends, below = falling[last], np.append(falling[last][1:], falling[-1])
    middles = (ends + below) / 2
    middles = np.where(middles == below, ends, middles)  # The mean may be rounded to the score below.
    above = np.nextafter(falling[:1], np.array(np.inf, falling.dtype))
    correct, predicted = np.cumsum(label_array[order] == 1)[last], np.flatnonzero(last) + 1
    return np.concatenate([above, middles]), np.append(0, correct), np.append(0, predicted)


def ndcg(gains: ArrayLike, ideal: ArrayLike) -> float:
    """Returns the normalized discounted cumulative gain of a query, 0 to 1 (Järvelin and Kekäläinen 2002).

    The gain of a document is the relevance, divided by log2(1 + rank), as in trec_eval.

    Args:
      gains: the relevance of each retrieved document, in the order of the ranks.
      ideal: the relevance of each document in the best order.
    """
    return min(_discounted(gains) / _discounted(ideal), 1.0)  # Rounding can increase the best value above 1.


def _discounted(gains: ArrayLike) -> float:
    gain_array = np.asarray(gains, np.float64)
    return float((gain_array / np.log2(np.arange(2, len(gain_array) + 2))).sum())


def reciprocal_rank(gains: ArrayLike) -> float:
    """Returns 1 / the rank of the first relevant document, 0.0 without any; `gains` are relevances by rank."""
    relevant = np.flatnonzero(np.asarray(gains) > 0)
    return float(1 / (1 + relevant[0])) if len(relevant) else 0.0


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns the entities (type, first, end) of a sentence's tags; `end` is one past the last word.

    Tags are O, B-type and I-type. Parses them leniently, as CoNLL's conlleval and seqeval's default mode do, so that
    IOB1 and IOB2 (BIO) both work: B- starts an entity. I- also starts an entity, unless the previous word has the same
    type.
    """
    spans: list[tuple[str, int, int]] = []
    before = ""
    for i, tag in enumerate(tags):
        kind, _, type_ = tag.partition("-")
        if tag != "O" and (kind not in ("B", "I") or not type_):
            raise ValueError(f"invalid tag {tag!r}; expected one of O, B-type, I-type")
        if kind == "I" and type_ == before:
            spans[-1] = (type_, spans[-1][1], i + 1)
        elif kind != "O":
            spans.append((type_, i, i + 1))
        before = type_
    return spans


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns precision, recall and F1, 0 to 1, of the entities of all sentences, micro-averaged.

    An entity is correct if the type and both ends are correct. A score with the denominator 0 is 0.0.
    """
    return _overlap(*_all_entities(gold, predicted))


def entity_scores_by_type(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Returns `entity_scores` per entity type, with types sorted."""
    sides = _all_entities(gold, predicted)
    types = sorted({entity[1] for side in sides for entity in side})
    return {type_: _overlap(*({entity for entity in side if entity[1] == type_} for side in sides)) for type_ in types}


def _all_entities(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> tuple[set[Entity], set[Entity]]:
    """Returns the entities (sentence, type, first, end) of both sides."""
    if [len(tags) for tags in gold] != [len(tags) for tags in predicted]:
        raise ValueError("gold and predicted tags are not of the same words")
    if not len(gold):
        raise ValueError("no examples to score; expected at least 1")
    gold_set, predicted_set = (
        {(i, *entity) for i, tags in enumerate(side) for entity in entities(tags)} for side in (gold, predicted)
    )
    return gold_set, predicted_set


def _overlap(gold: set[Entity], predicted: set[Entity]) -> dict[str, float]:
    correct = len(gold & predicted)
    return {
        "precision": correct / len(predicted) if predicted else 0.0,
        "recall": correct / len(gold) if gold else 0.0,
        "f1": _f1(correct, len(predicted), len(gold)),
    }


def normalize_answer(text: str) -> str:
    """Normalizes an answer as SQuAD does: lower case, no ASCII punctuation, no articles, single spaces."""
    # In this order: an article may be surrounded by punctuation, and only whole words are articles.
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_match(gold_texts: Sequence[str], prediction: str, version: str = "v2.0") -> int:
    """Returns 1 if the prediction equals a gold answer after `normalize_answer`, otherwise 0.

    As in evaluate-v2.0.py, gold answers that normalize to "" are ignored; if no gold answer remains, the empty
    prediction is correct. With the version "v1.1", such gold answers are not ignored, as in evaluate-v1.1.py.
    """
    return int(normalize_answer(prediction) in _answers(gold_texts, version))


def token_f1(gold_texts: Sequence[str], prediction: str, version: str = "v2.0") -> float:
    """Returns the F1, 0 to 1, of the prediction's words against the gold answer with the highest F1.

    Words are compared as multisets after `normalize_answer`. If both the prediction and the gold answer are empty, the
    F1 is 1 (in evaluate-v1.1.py, 0). If only one of them is empty, the F1 is 0. Gold answers are filtered as in
    `exact_match`.
    """
    predicted = normalize_answer(prediction).split()
    if not predicted and version == "v1.1":
        return 0.0
    return max(_token_f1(answer.split(), predicted) for answer in _answers(gold_texts, version))


def _answers(gold_texts: Sequence[str], version: str) -> list[str]:
    return [answer for answer in map(normalize_answer, gold_texts) if answer or version == "v1.1"] or [""]


def _token_f1(gold: list[str], predicted: list[str]) -> float:
    if not gold or not predicted:
        return float(gold == predicted)
    return _f1((Counter(gold) & Counter(predicted)).total(), len(predicted), len(gold))


def squad_scores(
    golds: dict[str, Sequence[str]], predictions: dict[str, str], version: str = "v2.0"
) -> dict[str, float]:
    """Returns the means of "exact_match" and "f1" over the questions, in percent, as evaluate-v1.1.py or -v2.0.py do.

    If there are questions without a gold answer, the result also contains the means over these questions
    ("no_answer_exact_match", "no_answer_f1") and the means over the questions with a gold answer ("has_answer_...").

    A question without a prediction scores 0, as in evaluate-v1.1.py; evaluate-v2.0.py skips such a question. The
    versions differ for answers that consist only of articles and punctuation.

    Args:
      golds: {question: gold answers}; [] for a question without an answer.
      predictions: {question: predicted answer}.
      version: "v1.1" or "v2.0".
    """
    if not golds:
        raise ValueError("no examples to score; expected at least 1")
    points = _points(golds, predictions, version)
    answerable = np.array([len(texts) > 0 for texts in golds.values()])
    groups = {"": np.ones(len(golds), bool)}
    if not answerable.all():
        groups |= {"has_answer_": answerable, "no_answer_": ~answerable}
    scores: dict[str, float] = {}
    for group, chosen in groups.items():
        if chosen.any():
            exact, words = 100 * points[chosen].mean(0)
            scores |= {f"{group}exact_match": float(exact), f"{group}f1": float(words)}
    return scores


def best_null_threshold(
    golds: dict[str, Sequence[str]], predictions: dict[str, str], null_odds: dict[str, float]
) -> tuple[float, float, float]:
    """Tunes the threshold of "no answer"; returns (threshold, best F1, best exact match), the scores in percent.

    Predictions with null odds above the threshold are replaced by the empty answer. The returned threshold is the
    lowest threshold with the best F1. The best exact match is tuned separately, as in evaluate-v2.0.py, and can belong
    to another threshold. Questions with equal null odds are always replaced together, unlike in the greedy search of
    evaluate-v2.0.py. Each score is therefore a result of `squad_scores` for some threshold. Questions without a
    prediction score 0 at every threshold.
    """
    asked = [name for name in golds if name in predictions]
    if not asked:
        raise ValueError("no examples to score; expected at least 1")
    asked.sort(key=lambda name: null_odds[name])
    kept = _points({name: golds[name] for name in asked}, predictions, "v2.0")
    emptied = _points({name: golds[name] for name in asked}, dict.fromkeys(asked, ""), "v2.0")
    # Row i: the scores if the first i predictions are kept. The first threshold keeps no prediction.
    totals = emptied.sum(0) + np.concatenate([np.zeros((1, 2)), np.cumsum(kept - emptied, 0)])
    odds = np.array([float(null_odds[name]) for name in asked])
    thresholds = np.concatenate([odds[:1] - 1, odds])
    # Questions with equal odds are kept together.
    last = np.append(thresholds[1:] != thresholds[:-1], True)
    percent, thresholds = 100 * totals[last] / len(golds), thresholds[last]
    best = percent[:, 1].argmax()
    return float(thresholds[best]), float(percent[best, 1]), float(percent[:, 0].max())


def _points(golds: dict[str, Sequence[str]], predictions: dict[str, str], version: str) -> np.ndarray:
    """Returns [questions, 2]: exact match and F1 of each question, 0 to 1."""
    points = [
        [score(texts, predictions[name], version) if name in predictions else 0 for score in (exact_match, token_f1)]
        for name, texts in golds.items()
    ]
    return np.array(points, np.float64)
