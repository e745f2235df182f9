"""The scores of held-out text: how much of it each source gives, and what their means make together."""

from collections.abc import Mapping, Sequence

from bertjax.objectives.objective import Term


def divided(sequences: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Divides a number of sequences among sources by their shares; each has a fourth of an equal part at least."""
    return {
        source: max(1, round(sequences * share), sequences // (4 * len(shares))) for source, share in shares.items()
    }


def normalized(shares: Mapping[str, float]) -> dict[str, float]:
    """Returns shares that add up to 1."""
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()}


def means_of(sums: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns the weighted means of an evaluation's sums, by objective and metric, where there is any weight."""
    found = {name: each for name, each in sums.items() if each["weight"]}
    return {name: {metric: x / each["weight"] for metric, x in each.items()} for name, each in found.items()}


def scores_of(
    terms: Sequence[Term], means: Mapping[str, Mapping[str, Mapping[str, float]]], shares: Mapping[str, float]
) -> dict[str, float]:
    """Returns the scores of objectives of the means of each source, which counts by its share.

    Of several sources also the loss and accuracy of each by the first objective, such as `mlm_loss (SOURCE)`.
    """
    scores = {}
    for name, _, objective in terms:
        given = {source: found[name] for source, found in means.items() if name in found}
        if given:
            own = normalized({source: shares[source] for source in given})
            means_of_all = {
                metric: sum(own[source] * found[metric] for source, found in given.items())
                for metric in next(iter(given.values()))
            }
            scores |= objective.metrics.scores(name, means_of_all)
    first, _, learnt = terms[0]
    kept = {f"{first}_{metric}" for metric in ("loss", "accuracy")}
    for source, found in means.items() if len(means) > 1 else ():
        own = learnt.metrics.scores(first, found[first]) if first in found else {}
        scores |= {f"{score} ({source})": value for score, value in own.items() if score in kept}
    return scores
