"""Arithmetic of the scores of held-out text: shares of the sources, means per source, scores of the objectives."""

from collections.abc import Mapping, Sequence

from bertjax.objectives.objective import Term

Means = Mapping[str, Mapping[str, float]]  # {name of an objective or a source: {metric: mean}}


def divide_sequences(sequences: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Divides a number of sequences among sources by their shares.

    Each source gets at least a quarter of `sequences / number of sources`. The sum may exceed `sequences`.
    """
    least = sequences // (4 * len(shares))
    return {source: max(1, round(sequences * share), least) for source, share in shares.items()}


def normalized(shares: Mapping[str, float]) -> dict[str, float]:
    """Returns shares that add up to 1."""
    total = sum(shares.values())
    return {source: share / total for source, share in shares.items()}


def means_of(sums: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns {objective: {metric: weighted mean}} for the objectives with a positive weight.

    Args:
      sums: {objective: {metric: weighted sum}}. The metric "weight" is the sum of the weights.
    """
    return {
        name: {metric: value / metrics["weight"] for metric, value in metrics.items()}
        for name, metrics in sums.items()
        if metrics["weight"]
    }


def objective_scores(
    terms: Sequence[Term], means: Mapping[str, Means], shares: Mapping[str, float]
) -> dict[str, float]:
    """Returns the scores of all objectives.

    With several sources, the result also has the loss and accuracy of the first objective per source, such as
    `mlm_loss (SOURCE)`.

    Args:
      terms: the objectives.
      means: the result of `means_of` for each source.
      shares: the weight of each source.
    """
    scores: dict[str, float] = {}
    for name, _, objective in terms:
        means_by_source = {source: by_objective[name] for source, by_objective in means.items() if name in by_objective}
        if means_by_source:
            scores |= objective.metrics.scores(name, _mean_over_sources(means_by_source, shares))
    first, _, objective = terms[0]
    kept = {f"{first}_{metric}" for metric in ("loss", "accuracy")}
    for source, by_objective in means.items() if len(means) > 1 else ():
        source_scores = objective.metrics.scores(first, by_objective[first]) if first in by_objective else {}
        scores |= {f"{score} ({source})": value for score, value in source_scores.items() if score in kept}
    return scores


def _mean_over_sources(means: Means, shares: Mapping[str, float]) -> dict[str, float]:
    """Returns {metric: mean weighted by `shares`} from {source: {metric: mean}}."""
    weights = normalized({source: shares[source] for source in means})
    metrics = next(iter(means.values()))
    return {metric: sum(weights[source] * values[metric] for source, values in means.items()) for metric in metrics}
