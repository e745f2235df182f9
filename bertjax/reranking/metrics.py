"""Metrics of ranked documents in NumPy, equal to the CrossEncoderRerankingEvaluator of sentence-transformers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from bertjax.finetuning import metrics


def ranking_metrics(scores: ArrayLike, grades: ArrayLike, k: int = 10, missing: ArrayLike = ()) -> dict[str, float]:
    """Returns metrics of one list of documents, 0 to 1: nDCG and MRR of the first k ranks, and MAP of all ranks.

    A document with a grade above 0 is relevant. All metrics of a list without a relevant document are 0. Documents with
    equal scores have the mean of their gains in nDCG, and one precision in MAP, as in scikit-learn. In MRR, documents
    with equal scores keep their order.

    Args:
      scores: the score of each document, `[documents]`; one document or more.
      grades: the relevance of each document, `[documents]`. A negative grade counts as 0.
      k: the number of ranks.
      missing: the grades of relevant documents that are not in the list, `[missing]`. They have no rank.

    Returns:
      {"ndcg@k", "mrr@k", "map"}, with the number k. All are NaN if a score is not finite.
    """
    score_array, gains = np.asarray(scores, np.float64), np.maximum(np.asarray(grades, np.float64), 0)
    if not np.isfinite(score_array).all():
        return {f"ndcg@{k}": np.nan, f"mrr@{k}": np.nan, "map": np.nan}
    is_relevant, all_gains = gains > 0, np.concatenate([gains, np.maximum(np.asarray(missing, np.float64), 0)])
    if not is_relevant.any():
        return {f"ndcg@{k}": 0.0, f"mrr@{k}": 0.0, "map": 0.0}
    _, groups, counts = np.unique(-score_array, return_inverse=True, return_counts=True)
    mean_gains = np.bincount(groups, gains) / counts
    order = np.argsort(-score_array, kind="stable")
    ndcg = metrics.ndcg(np.repeat(mean_gains, counts)[:k], np.sort(all_gains)[::-1][:k])
    precision = metrics.average_precision(is_relevant.astype(int), score_array)
    return {
        f"ndcg@{k}": ndcg,
        f"mrr@{k}": metrics.reciprocal_rank(gains[order[:k]]),
        "map": precision * is_relevant.sum() / (all_gains > 0).sum(),
    }


def mean_metrics(
    scores: Sequence[ArrayLike], grades: Sequence[ArrayLike], k: int = 10, missing: Sequence[ArrayLike] = ()
) -> dict[str, float]:
    """Returns the means of `ranking_metrics` over lists.

    Args:
      scores: the scores of each list, `[lists][documents]`; one list or more.
      grades: the grades of each list, `[lists][documents]`.
      k: the number of ranks.
      missing: the grades of the missing documents of each list, `[lists][missing]`; empty if none are missing.
    """
    lists = zip(scores, grades, missing or [()] * len(scores), strict=True)
    by_list = [ranking_metrics(list_scores, list_grades, k, rest) for list_scores, list_grades, rest in lists]
    return {name: float(np.mean([values[name] for values in by_list])) for name in by_list[0]}
