"""Sentence order prediction: whether two consecutive segments are swapped (ALBERT; Lan et al. 2020, section 3.1)."""

from bertjax.objectives.parts.pairs import PairMetrics, PairObjective


class SentenceOrderPrediction(PairObjective):
    """Classifies whether two consecutive segments are swapped."""

    pairs = "order"
    metrics = PairMetrics("sentence order")


OBJECTIVE = SentenceOrderPrediction()
