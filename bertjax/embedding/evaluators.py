"""How good vectors are: by pairs with scores or labels, and by what is found with them.

Each metric is that of an evaluator of sentence-transformers, of cosines or of dot products.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.embedding.datasets import EncodedTexts, TextSet
from bertjax.embedding.neighbors import nearest
from bertjax.embedding.retrieval import Search
from bertjax.finetuning import metrics
from bertjax.finetuning.metrics import comparable
from bertjax.finetuning.task import Split

RANKS = 10  # documents that are found for a query
ACCURACY_THRESHOLD, F1_THRESHOLD = "accuracy_threshold", "f1_threshold"  # similarities, tuned on the dev set


class Judge(NamedTuple):
    """How vectors are judged.

    Attributes:
      metric: what ranks runs.
      score: (the vector of each text) -> the metrics.
      decide: (the same) -> thresholds.
    """

    metric: str
    score: Callable[[np.ndarray], dict[str, float]]
    decide: Callable[[np.ndarray], dict[str, float]] = lambda vectors: {}


def judged(
    found: TextSet | Search,
    encoded: EncodedTexts,
    widths: Sequence[int] = (),
    decided: Mapping[str, float] | None = None,
    similarity: str = "cosine",
) -> tuple[Split, str]:
    """Returns a set with how vectors are judged by it, and the metric that ranks runs.

    Args:
      widths: how many first numbers of the vectors are judged as well; each is one more metric, such as spearman_64.
      decided: thresholds of labelled pairs that a dev set decided; None: they are tuned on these pairs.
      similarity: how vectors are compared, see `metrics.comparable`.
    """
    if isinstance(found, Search):
        judge = _of_search(found, encoded, similarity)
    elif found.values.dtype.kind == "f":
        judge = _of_scores(found, encoded, similarity)
    else:
        judge = _of_labels(found, encoded, similarity, decided)

    def score(outputs: list[np.ndarray]) -> dict[str, float]:
        vectors = np.stack(outputs)
        more = {f"{judge.metric}_{width}": judge.score(vectors[:, :width])[judge.metric] for width in widths}
        return judge.score(vectors) | more

    return Split(encoded.examples, score, lambda outputs: judge.decide(np.stack(outputs))), judge.metric


def _of_scores(found: TextSet, encoded: EncodedTexts, similarity: str) -> Judge:
    """As EmbeddingSimilarityEvaluator."""

    def score(vectors: np.ndarray) -> dict[str, float]:
        similar = _similarities(vectors, encoded, similarity)
        return {name: getattr(metrics, name)(found.values, similar) for name in ("spearman", "pearson")}

    return Judge("spearman", score)


def _of_labels(found: TextSet, encoded: EncodedTexts, similarity: str, decided: Mapping[str, float] | None) -> Judge:
    """As BinaryClassificationEvaluator, with a threshold for the accuracy and one for F1."""

    def decide(vectors: np.ndarray) -> dict[str, float]:
        if decided is not None:
            return dict(decided)
        similar = _similarities(vectors, encoded, similarity)
        best = metrics.best_accuracy(found.values, similar), metrics.best_f1(found.values, similar)
        return {name: threshold.value for name, threshold in zip((ACCURACY_THRESHOLD, F1_THRESHOLD), best)}

    def score(vectors: np.ndarray) -> dict[str, float]:
        similar, thresholds = _similarities(vectors, encoded, similarity), decide(vectors)
        return {
            "average_precision": metrics.average_precision(found.values, similar),
            "accuracy": metrics.accuracy(found.values, similar >= thresholds[ACCURACY_THRESHOLD]),
            "f1": metrics.f1(found.values, similar >= thresholds[F1_THRESHOLD]),
        }

    return Judge("average_precision", score, decide)


def _similarities(vectors: np.ndarray, encoded: EncodedTexts, similarity: str) -> np.ndarray:
    first, second = (comparable(vectors, similarity)[encoded.numbers[:, i]] for i in range(2))
    return (first * second).sum(-1)


def _of_search(search: Search, encoded: EncodedTexts, similarity: str) -> Judge:
    """As InformationRetrievalEvaluator; where documents are more or less relevant, nDCG counts that, as in BEIR."""
    asked, there = np.split(encoded.numbers, [len(search.queries)])
    ideals = [sorted(relevant.values(), reverse=True)[:RANKS] for relevant in search.relevant]

    def score(vectors: np.ndarray) -> dict[str, float]:
        ranks = RANKS + search.ignores_identical_ids  # One of them may be left out.
        found = nearest(vectors[asked], vectors[there], ranks, similarity).numbers.tolist()
        if search.ignores_identical_ids:
            rows = zip(found, search.identical, strict=True)
            found = [[number for number in row if number != own][:RANKS] for row, own in rows]
        gains = [[relevant.get(number, 0) for number in row] for row, relevant in zip(found, search.relevant)]

        def recall(ranks: int) -> float:
            shares = [np.count_nonzero(row[:ranks]) / len(each) for row, each in zip(gains, search.relevant)]
            return float(np.mean(shares))

        return {
            "ndcg@10": float(np.mean([metrics.ndcg(*each) for each in zip(gains, ideals)])),
            "mrr@10": float(np.mean([metrics.reciprocal_rank(row) for row in gains])),
            "recall@1": recall(1),
            "recall@10": recall(10),
        }

    return Judge("ndcg@10", score)
