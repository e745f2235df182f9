import numpy as np
import pytest

from bertjax.finetuning import metrics
from bertjax.reranking.metrics import mean_metrics, ranking_metrics


def test_metrics_of_a_list_by_hand():
    discounts = 1 / np.log2(np.arange(2, 6))
    scores = ranking_metrics([0.1, 0.9, 0.5, 0.3], [1, 0, 3, 0], k=3)
    assert scores == pytest.approx(
        {
            "ndcg@3": 3 * discounts[1] / (3 * discounts[0] + discounts[1]),
            "mrr@3": 1 / 2,
            "map": (1 / 2 + 2 / 4) / 2,
        }
    )
    assert ranking_metrics([0.1, 0.9, 0.5, 0.3], [1, 0, 0, 0], k=3)["mrr@3"] == 0
    assert ranking_metrics([0.1, 0.9, 0.5, 0.3], [1, 0, 0, 0], k=4)["mrr@4"] == 1 / 4


def test_metrics_of_equal_scores_do_not_depend_on_the_relevant_place():
    for grades in np.eye(4):
        scores = ranking_metrics(np.zeros(4, np.float32), grades)
        assert scores["map"] == 1 / 4
        assert scores["ndcg@10"] == pytest.approx((1 / np.log2(np.arange(2, 6))).mean())
        assert scores["mrr@10"] == 1 / (1 + grades.argmax())


def test_ndcg_is_at_most_one():
    rng = np.random.default_rng(0)
    for _ in range(500):
        grades = rng.random(rng.integers(1, 30))
        assert ranking_metrics(grades, grades)["ndcg@10"] == pytest.approx(1)
        for scores in (grades, 2 * grades - 1, rng.integers(0, 3, len(grades))):
            values = ranking_metrics(scores, grades)
            assert all(0 <= value <= 1 for value in values.values())
    almost_equal = [1.0, 1.0, 1.0, np.nextafter(1.0, 2.0)]  # The quotient is rounded to a number above 1.
    assert metrics.ndcg(almost_equal, almost_equal[::-1]) == 1


@pytest.mark.parametrize("grades", [[0, 0, 0], [0, -1, 0], [-0.5, -2, -3]])
def test_a_list_without_relevant_documents_scores_zero(grades):
    assert ranking_metrics([1, 2, 3], grades, k=5) == {"ndcg@5": 0, "mrr@5": 0, "map": 0}


def test_one_document():
    assert ranking_metrics([-7.0], [2]) == {"ndcg@10": 1, "mrr@10": 1, "map": 1}
    assert ranking_metrics([-7.0], [0]) == {"ndcg@10": 0, "mrr@10": 0, "map": 0}


def test_the_mean_counts_lists_once():
    lists = [([1.0, 2.0], [1, 0]), ([1.0, 2.0, 3.0], [0, 0, 1]), ([1.0], [0])]
    by_list = [ranking_metrics(*pair, k=2) for pair in lists]
    means = mean_metrics(*zip(*lists), k=2)
    assert means == pytest.approx({name: np.mean([scores[name] for scores in by_list]) for name in by_list[0]})
    assert means["mrr@2"] == pytest.approx(0.5)
    with pytest.raises(ValueError):
        mean_metrics([[1.0]], [[1], [0]])


def test_missing_relevant_documents_lower_the_metrics():
    whole = ranking_metrics([3.0, 2.0, 1.0], [1, 0, 1])
    with_missing = ranking_metrics([3.0, 2.0, 1.0], [1, 0, 1], missing=[1.0, 1.0])
    assert with_missing["mrr@10"] == whole["mrr@10"] == 1
    assert with_missing["map"] == pytest.approx(whole["map"] / 2)
    ideal = (1 / np.log2(np.arange(2, 6))).sum()
    assert with_missing["ndcg@10"] == pytest.approx((1 + 1 / 2) / ideal)
    assert all(np.isnan(value) for value in ranking_metrics([np.nan, 1.0], [1, 0]).values())
