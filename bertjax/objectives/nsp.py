"""Next sentence prediction: whether segment B follows segment A (Devlin et al. 2019, section 3.1)."""

from bertjax.objectives.parts.pairs import PairMetrics, PairObjective


class NextSentencePrediction(PairObjective):
    """Classifies whether segment B follows segment A, or is a random segment."""

    pairs = "pairs"
    metrics = PairMetrics("next sentence")


OBJECTIVE = NextSentencePrediction()
