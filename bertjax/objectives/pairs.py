"""What the objectives on pairs of segments have in common: two classes of the pooled output."""

from collections.abc import Mapping

from bertjax.config import BertConfig
from bertjax.objectives import Plot
from bertjax.validation import require

PLOTS = (Plot("accuracy of sentence pairs", "accuracy", "{name}_majority"),)


def heads(config, compute) -> dict:
    from bertjax.model.heads import NextSentenceHead

    return {"next_sentence": NextSentenceHead(config)}


def loss(encoded, weights, keys):
    from bertjax.objectives.model import classified

    del keys
    return classified(encoded.heads["next_sentence"](encoded.pooled()), encoded.batch["pair_labels"], weights)


def baselines(batch, weights, statistics):
    return {"label_1": (weights * batch["pair_labels"]).sum()}


def scores(name: str, means: dict[str, float]) -> dict[str, float]:
    majority = max(means["label_1"], 1 - means["label_1"])
    return {f"{name}_loss": means["loss"], f"{name}_accuracy": means["accuracy"], f"{name}_majority": majority}


def report(title: str, name: str, scores: Mapping[str, float]) -> list[str]:
    accuracy, majority = (scores[f"{name}_{metric}"] for metric in ("accuracy", "majority"))
    return [f"held-out {title}: accuracy {accuracy:.1%}; always the more frequent class {majority:.1%}"]


def flops(config: BertConfig, row) -> int:
    from bertjax.model.heads import pooled_flops

    return pooled_flops(config, row.sequences)


def validate(config, needed: str) -> None:
    given = config.data.next_sentence
    remedy = f"records need other pairs for objective = {config.objective!r}: set {needed}, or another objective"
    require(given == needed, "data.next_sentence", given, remedy)
