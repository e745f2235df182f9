"""Metrics of ranked documents in NumPy, equal to the CrossEncoderRerankingEvaluator of sentence-transformers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from bertjax.common.errors import UserError
from bertjax.finetuning import metrics


def ranking_metrics(scores: ArrayLike, grades: ArrayLike, k: int = 10) -> dict[str, float]:
    """Returns metrics of one list of documents, 0 to 1: nDCG and MRR of the first k ranks, and MAP of all ranks.

    A document with a grade above 0 is relevant. All metrics of a list without a relevant document are 0. Documents with
    equal scores have the mean of their gains in nDCG, and one precision in MAP, as in scikit-learn. In MRR, the last of
    the documents with equal scores has the first rank.

    Args:
      scores: the score of each document, `[documents]`; one document or more.
      grades: the relevance of each document, `[documents]`. A negative grade counts as 0.
      k: the number of ranks.

    Returns:
      {"ndcg@k", "mrr@k", "map"}, with the number k.
    """
    score_array, gains = np.asarray(scores, np.float64), np.maximum(np.asarray(grades, np.float64), 0)
    is_relevant = gains > 0
    if not is_relevant.any():
        return {f"ndcg@{k}": 0.0, f"mrr@{k}": 0.0, "map": 0.0}
    _, groups, counts = np.unique(-score_array, return_inverse=True, return_counts=True)
    mean_gains = np.bincount(groups, gains) / counts
    order = np.argsort(score_array, kind="stable")[::-1]
    ndcg = metrics.ndcg(np.repeat(mean_gains, counts)[:k], np.sort(gains)[::-1][:k])
    return {
        f"ndcg@{k}": min(ndcg, 1.0),  # Rounding can increase the best value above 1.
        f"mrr@{k}": metrics.reciprocal_rank(gains[order[:k]]),
        "map": metrics.average_precision(is_relevant.astype(int), score_array),
    }


def mean_metrics(scores: Sequence[ArrayLike], grades: Sequence[ArrayLike], k: int = 10) -> dict[str, float]:
    """Returns the means of `ranking_metrics` over lists.

    Args:
      scores: the scores of each list, `[lists][documents]`; one list or more.
      grades: the grades of each list, `[lists][documents]`.
      k: the number of ranks.
    """
    by_list = [ranking_metrics(*pair, k) for pair in zip(scores, grades, strict=True)]
    return {name: float(np.mean([values[name] for values in by_list])) for name in by_list[0]}


def check_list(place: str, scores: ArrayLike, grades: ArrayLike) -> None:
    """Checks a list of documents before the evaluation.

    Args:
      place: the place of the list in the data, such as a file and a line, for the message.
      scores: the score of each document, `[documents]`.
      grades: the relevance of each document, `[documents]`.

    Raises:
      UserError: if the list is empty, if the numbers of scores and grades differ, or if a value is not finite.
    """
    score_array, grade_array = np.asarray(scores, np.float64), np.asarray(grades, np.float64)
    if not grade_array.size:
        raise UserError(f"{place}: 0 documents: a list must have 1 document or more; remove the list")
    if score_array.shape != grade_array.shape:
        raise UserError(
            f"{place}: {score_array.size} scores, {grade_array.size} grades: the numbers must be equal; add the "
            f"missing values"
        )
    fixes = {
        "grade": (grade_array, "correct the grade, 0 for irrelevant documents"),
        "score": (score_array, "choose an earlier checkpoint, or train with a lower config.optimizer.learning_rate"),
    }
    for name, (values, fix) in fixes.items():
        invalid = values[~np.isfinite(values)]
        if invalid.size:
            raise UserError(f"{place}: {name} {invalid[0]}: must be a finite number; {fix}")
