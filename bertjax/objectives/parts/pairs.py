"""What the objectives on pairs of segments have in common: two classes of the pooled output."""

import functools
from collections.abc import Mapping

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig
from bertjax.objectives.objective import Objective, Plot


def telling(title: str, pairs: str) -> Objective:
    """Returns an objective that tells the two classes of `pair_labels` apart.

    Args:
      pairs: the value of `data.next_sentence` that makes such pairs.
    """
    return Objective(
        loss=_loss,
        scores=_scores,
        report=functools.partial(_report, title),
        heads=_heads,
        baselines=lambda batch, weights, statistics: {"label_1": (weights * batch["pair_labels"]).sum()},
        flops=_flops,
        validate=functools.partial(_validate, pairs),
        plots=(Plot("accuracy of sentence pairs", "accuracy", "{name}_majority"),),
    )


def _heads(config, compute) -> dict:
    from bertjax.nn.heads import NextSentenceHead

    return {"next_sentence": NextSentenceHead(config)}


def _loss(encoded, weights, keys):
    from bertjax.objectives.parts.pretraining_model import classified

    del keys
    return classified(encoded.heads["next_sentence"](encoded.pooled()), encoded.batch["pair_labels"], weights)


def _scores(name: str, means: dict[str, float]) -> dict[str, float]:
    majority = max(means["label_1"], 1 - means["label_1"])
    return {f"{name}_loss": means["loss"], f"{name}_accuracy": means["accuracy"], f"{name}_majority": majority}


def _report(title: str, name: str, scores: Mapping[str, float]) -> list[str]:
    accuracy, majority = (scores[f"{name}_{metric}"] for metric in ("accuracy", "majority"))
    return [f"held-out {title}: accuracy {accuracy:.1%}; always the more frequent class {majority:.1%}"]


def _flops(config: BertConfig, row) -> int:
    from bertjax.nn.heads import pooled_flops

    return pooled_flops(config, row.sequences)


def _validate(pairs: str, config) -> None:
    given = config.data.next_sentence
    remedy = f"records need other pairs for objective = {config.objective!r}: set {pairs}, or another objective"
    require(given == pairs, "data.next_sentence", given, remedy)
