"""Evaluates embeddings on pairs with scores or labels, and by retrieval.

The metrics are defined as in the evaluators of sentence-transformers. They compare embeddings by cosines or dot
products.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.limits import FLOAT32
from bertjax.embedding.datasets import EncodedTexts
from bertjax.embedding.forms import TextSet
from bertjax.embedding.neighbors import nearest
from bertjax.embedding.retrieval import Search
from bertjax.embedding.small_vectors import RESCORE, nearest_small
from bertjax.finetuning import metrics
from bertjax.finetuning.metrics import comparable
from bertjax.inference.quantization import Quantizer, check_precision
from bertjax.inference.task import Split

RANKS = 10  # documents that are retrieved for a query
ACCURACY_THRESHOLD, F1_THRESHOLD = "accuracy_threshold", "f1_threshold"  # similarities, tuned on the dev set


@dataclasses.dataclass(frozen=True)
class EmbeddedTexts(Split):
    """A set of texts that embeddings are evaluated on.

    Attributes:
      metric: the name of the metric that ranks runs.
      numbers: `EncodedTexts.numbers` of the set. The `examples` are the distinct texts of the set.
      widths: further widths. For each of these widths, `metric` is also computed with the first dimensions of the
        embeddings, under a name such as spearman_64.
      similarity: the comparison of embeddings, see `metrics.comparable`.
    """

    metric: ClassVar[str]
    numbers: np.ndarray
    widths: Sequence[int] = ()
    similarity: str = "cosine"

    @abc.abstractmethod
    def score_embeddings(self, embeddings: np.ndarray) -> dict[str, float]:
        """Returns the metrics of the embeddings `[texts, width]` of the distinct texts."""

    def decode(self, outputs: list[np.ndarray]) -> np.ndarray:
        """Returns the embeddings of the distinct texts, `[texts, width]`."""
        return np.stack(outputs)

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        """Returns the metrics of embeddings, and `metric` of each of the `widths`."""
        shortened = {
            f"{self.metric}_{width}": self.score_embeddings(predictions[:, :width])[self.metric]
            for width in self.widths
        }
        return self.score_embeddings(predictions) | shortened

    def similarities(self, embeddings: np.ndarray) -> np.ndarray:
        """Returns the similarity of the two texts of each pair, `[pairs]`."""
        first, second = (comparable(embeddings, self.similarity)[self.numbers[:, i]] for i in range(2))
        return (first * second).sum(-1)


@dataclasses.dataclass(frozen=True)
class ScoredTexts(EmbeddedTexts):
    """Pairs with scores `[pairs]`, as EmbeddingSimilarityEvaluator."""

    metric = "spearman"
    scores: np.ndarray = dataclasses.field(kw_only=True)

    def score_embeddings(self, embeddings: np.ndarray) -> dict[str, float]:
        """Returns the correlations of similarities and scores."""
        similarities = self.similarities(embeddings)
        return {name: getattr(metrics, name)(self.scores, similarities) for name in ("spearman", "pearson")}


@dataclasses.dataclass(frozen=True)
class BinaryPairs(EmbeddedTexts):
    """Pairs with labels `[pairs]`, as BinaryClassificationEvaluator: a threshold for the accuracy and one for F1.

    Attributes:
      labels: 1 for texts that belong together, else 0.
      thresholds: thresholds that were tuned on a dev set; None tunes the thresholds on these pairs.
    """

    metric = "average_precision"
    labels: np.ndarray = dataclasses.field(kw_only=True)
    thresholds: Mapping[str, float] | None = None

    def decide(self, predictions: np.ndarray) -> dict[str, float]:
        """Returns the thresholds."""
        if self.thresholds is not None:
            return dict(self.thresholds)
        similarities = self.similarities(predictions)
        best = metrics.best_accuracy(self.labels, similarities), metrics.best_f1(self.labels, similarities)
        return {name: threshold.value for name, threshold in zip((ACCURACY_THRESHOLD, F1_THRESHOLD), best)}

    def score_embeddings(self, embeddings: np.ndarray) -> dict[str, float]:
        """Returns the average precision of the similarities, and the accuracy and F1 with the thresholds."""
        similarities, thresholds = self.similarities(embeddings), self.decide(embeddings)
        return {
            "average_precision": metrics.average_precision(self.labels, similarities),
            "accuracy": metrics.accuracy(self.labels, similarities >= thresholds[ACCURACY_THRESHOLD]),
            "f1": metrics.f1(self.labels, similarities >= thresholds[F1_THRESHOLD]),
        }


@dataclasses.dataclass(frozen=True)
class Retrieval(EmbeddedTexts):
    """Queries and documents, as InformationRetrievalEvaluator; nDCG uses the grades of relevance, as in BEIR.

    Attributes:
      search: the queries and documents.
      precision: int8 or ubinary also evaluates small documents, see `nearest_small`; float32 does not.
      rescore: see `nearest_small`.
    """

    metric = "ndcg@10"
    search: Search = dataclasses.field(kw_only=True)
    precision: str = dataclasses.field(default=FLOAT32, kw_only=True)
    rescore: int = dataclasses.field(default=RESCORE, kw_only=True)

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        """Returns the metrics of embeddings, `metric` of each of the `widths`, and the metrics of small documents."""
        scores = super().score(predictions)
        if self.precision == FLOAT32:
            return scores
        queries, documents = (comparable(vectors, self.similarity) for vectors in self._sides(predictions))
        quantizer = Quantizer.calibrated(self.precision, documents)
        retrieved = nearest_small(queries, quantizer(documents), quantizer, self._ranks, self.rescore)
        small = self._score_retrieved(retrieved.numbers)
        return scores | {f"{name}_{self.precision}": score for name, score in small.items()}

    def score_embeddings(self, embeddings: np.ndarray) -> dict[str, float]:
        """Returns the metrics of the retrieved documents."""
        return self._score_retrieved(nearest(*self._sides(embeddings), self._ranks, self.similarity).numbers)

    @property
    def _ranks(self) -> int:
        return RANKS + self.search.ignores_identical_ids  # One of them may be left out.

    def _sides(self, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the embeddings of the queries and the embeddings of the documents."""
        queries, documents = np.split(self.numbers, [len(self.search.queries)])
        return embeddings[queries], embeddings[documents]

    def _score_retrieved(self, numbers: np.ndarray) -> dict[str, float]:
        """Returns the metrics of retrieved documents, `[queries, ranks]`."""
        search, retrieved = self.search, numbers.tolist()
        if search.ignores_identical_ids:
            rows = zip(retrieved, search.identical, strict=True)
            retrieved = [[number for number in row if number != identical][:RANKS] for row, identical in rows]
        gains = [[relevant.get(number, 0) for number in row] for row, relevant in zip(retrieved, search.relevant)]
        ideals = [sorted(relevant.values(), reverse=True)[:RANKS] for relevant in search.relevant]

        def recall(ranks: int) -> float:
            shares = [np.count_nonzero(row[:ranks]) / len(rest) for row, rest in zip(gains, search.relevant)]
            return float(np.mean(shares))

        return {
            "ndcg@10": float(np.mean([metrics.ndcg(*pair) for pair in zip(gains, ideals)])),
            "mrr@10": float(np.mean([metrics.reciprocal_rank(row) for row in gains])),
            "recall@1": recall(1),
            "recall@10": recall(10),
        }


def with_small_documents(split: EmbeddedTexts, precision: str | None, rescore: int | None) -> EmbeddedTexts:
    """Returns a set that also evaluates small documents.

    Args:
      split: the set.
      precision: float32, int8 or ubinary; None for float32.
      rescore: see `nearest_small`; None for the default.

    Raises:
      UserError: if the set has no documents, or if only `rescore` is set.
    """
    check_precision(precision or FLOAT32, "")
    if precision in (None, FLOAT32):
        if rescore is not None:
            raise UserError(f"--rescore={rescore}: is for small vectors; add --precision=int8 or --precision=ubinary")
        return split
    if not isinstance(split, Retrieval):
        raise UserError(f"--precision={precision}: is for queries and documents, such as form=search; leave it out")
    if rescore is not None and rescore < 1:
        raise UserError(f"--rescore={rescore}: must be at least 1")
    return dataclasses.replace(split, precision=precision, rescore=rescore or RESCORE)


def make_split(
    texts: TextSet | Search,
    encoded: EncodedTexts,
    widths: Sequence[int] = (),
    thresholds: Mapping[str, float] | None = None,
    similarity: str = "cosine",
) -> EmbeddedTexts:
    """Returns a set as a split that embeddings are evaluated on.

    Args:
      texts: the set.
      encoded: the encoded set.
      widths: see `EmbeddedTexts`.
      thresholds: see `BinaryPairs`.
      similarity: see `EmbeddedTexts`.
    """
    arguments = (encoded.examples, encoded.numbers, widths, similarity)
    if isinstance(texts, Search):
        return Retrieval(*arguments, search=texts)
    if texts.values is None:
        raise ValueError("the set has neither queries, nor scores or labels; see `forms.JUDGES`")
    if texts.values.dtype.kind == "f":
        return ScoredTexts(*arguments, scores=texts.values)
    return BinaryPairs(*arguments, labels=texts.values, thresholds=thresholds)
