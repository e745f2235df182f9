"""The metrics of the tasks, in NumPy: GLUE's, CoNLL's entity F1, SQuAD's exact match and F1, those of vectors."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def softmax(logits) -> np.ndarray:
    """Returns the probabilities [n] of logits [n]."""
    shares = np.exp(np.asarray(logits) - np.max(logits))  # SciPy's function, without the time of its import
    return shares / shares.sum()


def comparable(vectors, similarity: str) -> np.ndarray:
    """Returns vectors whose dot products are their similarities.

    Args:
      similarity: cosine or dot, as sentence-transformers' `similarity_fn_name`.
    """
    return l2_normalize(vectors) if similarity == "cosine" else np.asarray(vectors)


def l2_normalize(vectors) -> np.ndarray:
    """Returns vectors [..., width] divided by their lengths, in float32; one of length 0 stays."""
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def accuracy(labels, predictions) -> float:
    """Returns the fraction of predictions [n] that equal their labels [n], 0 to 1."""
    labels, predictions = _pair(labels, predictions)
    return float((labels == predictions).mean())


def f1(labels, predictions, positive=1) -> float:
    """Returns the F1 of the class `positive`, 0 to 1, for labels and predictions [n]; 0.0 if neither contains it."""
    labels, predictions = _pair(labels, predictions)
    found, wanted = predictions == positive, labels == positive
    return _f1((found & wanted).sum(), found.sum(), wanted.sum())


def macro_f1(labels, predictions) -> float:
    """Returns the mean F1, 0 to 1, of the classes in labels or predictions [n]."""
    wanted, found, correct = _counts(*_pair(labels, predictions))
    return float((2 * correct / (wanted + found)).mean())


def _counts(labels: np.ndarray, predictions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns how many labels, predictions and correct predictions each class has; floats: products overflow int64."""
    _, classes = np.unique(np.concatenate([labels, predictions]), return_inverse=True)
    wanted, found = np.split(classes.reshape(-1), 2)
    counts = (np.bincount(x, minlength=classes.max() + 1) for x in (wanted, found, wanted[wanted == found]))
    return tuple(x.astype(np.float64) for x in counts)


def sigmoid(logits) -> np.ndarray:
    """Returns the probability of each logit by itself, in float64."""
    return np.exp(-np.logaddexp(0, -np.asarray(logits, np.float64)))  # without an overflow


def f1_of_labels(labels, predictions) -> dict[str, float]:
    """Returns the F1, 0 to 1, of labels that do not exclude each other: booleans [n, labels].

    "micro_f1" counts all labels together, "macro_f1" is the mean of the labels' own F1, of which one that is neither
    there nor predicted has 0.0, as in scikit-learn.
    """
    wanted, found = (np.asarray(side, bool) for side in (labels, predictions))
    if wanted.shape != found.shape or not len(wanted):
        raise ValueError(f"{wanted.shape} labels and {found.shape} predictions")
    counts = [(wanted & found).sum(0), found.sum(0), wanted.sum(0)]
    by_label = [_f1(*each) for each in zip(*counts)]
    return {"micro_f1": _f1(*(each.sum() for each in counts)), "macro_f1": float(np.mean(by_label))}


def best_threshold(labels, probabilities) -> float:
    """Returns the threshold above which probabilities [n, labels] are labels with the best micro F1.

    It lies in the middle between two probabilities. Of several that are equally good, it is the one nearest to 0.5.
    """
    wanted = np.asarray(labels, bool).ravel()
    order = np.argsort(-np.ravel(probabilities), kind="stable")
    falling = np.append(np.ravel(probabilities)[order], 0.0)
    correct, found = np.cumsum(wanted[order]), np.arange(1, len(order) + 1)
    scores = 2 * correct / (found + wanted.sum())  # F1 if the likeliest are taken, as many as `found`
    scores[falling[:-1] == falling[1:]] = -1.0  # equal ones are all found, or none of them
    middles = (falling[:-1] + falling[1:]) / 2
    best = middles[scores == scores.max()]
    return float(best[np.abs(best - 0.5).argmin()])


def matthews(labels, predictions) -> float:
    """Returns Matthews' correlation, -1 to 1, of classes [n]; 0.0 if all labels or all predictions are equal.

    For more than two classes it is Gorodkin's R_K (2004), as in scikit-learn.
    """
    labels, predictions = _pair(labels, predictions)
    wanted, found, _ = _counts(labels, predictions)
    n, correct = float(len(labels)), float((labels == predictions).sum())
    spread = (n * n - float(wanted @ wanted)) * (n * n - float(found @ found))
    return (n * correct - float(wanted @ found)) / spread**0.5 if spread else 0.0


def pearson(labels, scores) -> float:
    """Returns Pearson's correlation, -1 to 1, of numbers [n]; NaN, as in SciPy, if a side is constant or has a NaN."""
    pair = [x.astype(np.float64) for x in _pair(labels, scores)]
    # Before subtracting the mean: it is rounded, so constants need not become 0.
    if any((x == x[0]).all() for x in pair):
        return float("nan")
    x, y = [(x - x.mean()) / np.linalg.norm(x - x.mean()) for x in pair]
    return float(np.clip(x @ y, -1, 1))


def spearman(labels, scores) -> float:
    """Returns Spearman's correlation, -1 to 1, of numbers [n]: Pearson's of the ranks; ties share their mean rank.

    NaN if Pearson's is.
    """
    return pearson(*(_ranks(x.astype(np.float64)) for x in _pair(labels, scores)))


def _ranks(values: np.ndarray) -> np.ndarray:
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return np.where(np.isnan(values), np.nan, ranks[which])


def _pair(labels, predictions) -> tuple[np.ndarray, np.ndarray]:
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    if labels.ndim != 1 or labels.shape != predictions.shape:
        raise ValueError(f"labels and predictions must both be [n]: {labels.shape} and {predictions.shape}")
    if not len(labels):
        raise ValueError("nothing to score")
    return labels, predictions


def _f1(correct, found, wanted) -> float:
    """Returns the harmonic mean of correct / found and correct / wanted; 0.0 if both are 0."""
    return float(2 * correct / (found + wanted)) if found + wanted else 0.0


class Threshold(NamedTuple):
    """A score from which on examples are taken for positive ones, and the metric that it is the best for."""

    value: float
    best: float


def best_accuracy(labels, scores) -> Threshold:
    """Returns the threshold of scores [n] with the best accuracy for labels [n], 1 or 0.

    It lies in the middle between two scores, or above all, as in sentence-transformers' BinaryClassificationEvaluator.
    Of several that are equally good, it is the highest.
    """
    thresholds, correct, found = _falling(labels, scores)
    negatives = found[-1] - correct[-1]
    shares = (correct + negatives - (found - correct)) / found[-1]
    best = shares.argmax()
    return Threshold(float(thresholds[best]), float(shares[best]))


def best_f1(labels, scores) -> Threshold:
    """As `best_accuracy`, with the best F1."""
    thresholds, correct, found = _falling(labels, scores)
    shares = 2 * correct / (found + correct[-1])
    best = shares.argmax()
    return Threshold(float(thresholds[best]), float(shares[best]))


def average_precision(labels, scores) -> float:
    """Returns the mean of the precisions at each positive label, 0 to 1, of labels [n], 1 or 0, by falling scores [n].

    Those with equal scores have one precision, as in scikit-learn. There must be a positive label.
    """
    _, correct, found = _falling(labels, scores)
    return float((np.diff(correct) * correct[1:] / found[1:]).sum() / correct[-1])


def _falling(labels, scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns thresholds of scores, the highest one first, and how many are positive and how many are found with each.

    With the first one none is found.
    """
    labels, scores = _pair(labels, scores)
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    last = np.append(falling[1:] != falling[:-1], True)  # those with equal scores are found together
    ends, below = falling[last], np.append(falling[last][1:], falling[-1])
    middles = (ends + below) / 2
    middles = np.where(middles == below, ends, middles)  # it may be rounded to the score below
    above = np.nextafter(falling[:1], np.array(np.inf, falling.dtype))
    correct, found = np.cumsum(labels[order] == 1)[last], np.flatnonzero(last) + 1
    return np.concatenate([above, middles]), np.append(0, correct), np.append(0, found)


def ndcg(gains, ideal) -> float:
    """Returns the normalized discounted cumulative gain, 0 to 1, of what is found for a query (Järvelin and Kekäläinen
    2002).

    As trec_eval computes it: a document's gain is its relevance, divided by log2(1 + rank).

    Args:
      gains: the relevance of each of the documents found, in their order.
      ideal: those in the order that would be the best.
    """
    return _discounted(gains) / _discounted(ideal)


def _discounted(gains) -> float:
    gains = np.asarray(gains, np.float64)
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())


def reciprocal_rank(gains) -> float:
    """Returns 1 / the rank of the first relevant document among those found, whose relevance `gains` are; 0.0: none."""
    relevant = np.flatnonzero(np.asarray(gains) > 0)
    return float(1 / (1 + relevant[0])) if len(relevant) else 0.0


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns the entities (type, first, end) of a sentence's tags; `end` is one past the last word.

    Tags are O, B-type and I-type. Parses them leniently, as CoNLL's conlleval and seqeval's default mode do, so that
    IOB1 and IOB2 (BIO) both work: B- starts an entity, and so does I- unless the previous word has its type.
    """
    found, before = [], ""
    for i, tag in enumerate(tags):
        kind, _, type_ = tag.partition("-")
        if tag != "O" and (kind not in ("B", "I") or not type_):
            raise ValueError(f"invalid tag {tag!r}; expected one of O, B-type, I-type")
        if kind == "I" and type_ == before:
            found[-1] = (type_, found[-1][1], i + 1)
        elif kind != "O":
            found.append((type_, i, i + 1))
        before = type_
    return found


def entity_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns precision, recall and F1, 0 to 1, of the entities of all sentences, micro-averaged.

    An entity is correct if its type and both ends are. 0.0 if the denominator is 0.
    """
    return _overlap(*_all_entities(gold, predicted))


def entity_scores_by_type(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Returns `entity_scores` per entity type, with types sorted."""
    wanted, found = _all_entities(gold, predicted)
    by_type: dict[str, tuple[set, set]] = {
        entity[1]: (set(), set()) for entity in sorted(wanted | found, key=lambda e: e[1])
    }
    for side, found_there in enumerate((wanted, found)):
        for entity in found_there:
            by_type[entity[1]][side].add(entity)
    return {type_: _overlap(*sides) for type_, sides in by_type.items()}


def _all_entities(gold, predicted) -> tuple[set[tuple], set[tuple]]:
    """Returns the entities (sentence, type, first, end) of both sides."""
    if [len(tags) for tags in gold] != [len(tags) for tags in predicted]:
        raise ValueError("gold and predicted tags are not of the same words")
    if not len(gold):
        raise ValueError("nothing to score")
    wanted, found = [{(i, *e) for i, tags in enumerate(side) for e in entities(tags)} for side in (gold, predicted)]
    return wanted, found


def _overlap(wanted: set, found: set) -> dict[str, float]:
    correct = len(wanted & found)
    return {
        "precision": correct / len(found) if found else 0.0,
        "recall": correct / len(wanted) if wanted else 0.0,
        "f1": _f1(correct, len(found), len(wanted)),
    }


def normalize_answer(text: str) -> str:
    """Normalizes an answer as SQuAD does: lower case, no ASCII punctuation, no articles, single spaces."""
    # In this order: an article may be surrounded by punctuation, and only whole words are articles.
    return " ".join(ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split())


def exact_match(gold_texts: Sequence[str], prediction: str, version: str = "v2.0") -> int:
    """Returns 1 if the prediction equals a gold answer after `normalize_answer`, otherwise 0.

    As in evaluate-v2.0.py, gold answers that normalize to "" are ignored; if no other remains, the empty prediction is
    correct. evaluate-v1.1.py does not ignore them.
    """
    return int(normalize_answer(prediction) in _answers(gold_texts, version))


def token_f1(gold_texts: Sequence[str], prediction: str, version: str = "v2.0") -> float:
    """Returns the F1, 0 to 1, of the prediction's words against the gold answer with the highest F1.

    Words are compared as multisets after `normalize_answer`. If the prediction or the gold answer is empty, the F1 is
    1 if both are (0 in evaluate-v1.1.py), otherwise 0. Gold answers are filtered as in `exact_match`.
    """
    found = normalize_answer(prediction).split()
    if not found and version == "v1.1":
        return 0.0
    return max(_token_f1(answer.split(), found) for answer in _answers(gold_texts, version))


def _answers(gold_texts: Sequence[str], version: str) -> list[str]:
    return [answer for answer in map(normalize_answer, gold_texts) if answer or version == "v1.1"] or [""]


def _token_f1(wanted: list[str], found: list[str]) -> float:
    if not wanted or not found:
        return float(wanted == found)
    return _f1((Counter(wanted) & Counter(found)).total(), len(found), len(wanted))


def squad_scores(
    golds: dict[str, Sequence[str]], predictions: dict[str, str], version: str = "v2.0"
) -> dict[str, float]:
    """Returns the means of "exact_match" and "f1" over the questions, in percent, as evaluate-v1.1.py or -v2.0.py do.

    `golds` are the answers of each question, [] if it has none. If there are such questions, also returns the means
    over them ("no_answer_exact_match", "no_answer_f1") and over the others ("has_answer_..."). A question without a
    prediction scores 0, as in evaluate-v1.1.py; evaluate-v2.0.py skips it. The versions differ for answers that consist
    only of articles and punctuation.
    """
    if not golds:
        raise ValueError("nothing to score")
    points = _points(golds, predictions, version)
    answerable = np.array([len(texts) > 0 for texts in golds.values()])
    groups = {"": np.ones(len(golds), bool)}
    if not answerable.all():
        groups |= {"has_answer_": answerable, "no_answer_": ~answerable}
    scores = {}
    for group, chosen in groups.items():
        if chosen.any():
            exact, words = 100 * points[chosen].mean(0)
            scores |= {f"{group}exact_match": float(exact), f"{group}f1": float(words)}
    return scores


def best_null_threshold(
    golds: dict[str, Sequence[str]], predictions: dict[str, str], null_odds: dict[str, float]
) -> tuple[float, float, float]:
    """Tunes the threshold of "no answer"; returns (threshold, best F1, best exact match), the scores in percent.

    A prediction is replaced by the empty one if its null_odds > threshold. The threshold is the lowest with the best
    F1. The exact match is the best of any threshold, tuned independently as in evaluate-v2.0.py, so it can be lower at
    the returned threshold. That script's greedy search splits questions with equal odds; here both scores equal those
    of `squad_scores` for a threshold. Questions without a prediction score 0 at every threshold.
    """
    asked = [name for name in golds if name in predictions]
    if not asked:
        raise ValueError("nothing to score")
    asked.sort(key=lambda name: null_odds[name])
    kept = _points({name: golds[name] for name in asked}, predictions, "v2.0")
    emptied = _points({name: golds[name] for name in asked}, dict.fromkeys(asked, ""), "v2.0")
    # Row i: the scores if the first i are kept. The first threshold keeps none.
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
