"""Objectives that classify pairs of segments by the pooled output."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, Compute
from bertjax.data.batch import RowSize
from bertjax.objectives.objective import Metrics, Objective, ObjectiveMetrics, Plot

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from ml_collections import ConfigDict

    from bertjax.objectives.encoded_batch import EncodedBatch


class PairMetrics(ObjectiveMetrics):
    """The accuracy, beside the accuracy of the more frequent class.

    Args:
      title: the name of the predictions in the report, such as "next sentence".
    """

    plots = (Plot("accuracy of sentence pairs", "accuracy", "{name}_majority"),)

    def __init__(self, title: str) -> None:
        self.title = title

    def scores(self, name: str, means: Mapping[str, float]) -> dict[str, float]:
        """Returns the loss, the accuracy and the majority baseline."""
        majority = max(means["label_1"], 1 - means["label_1"])
        return {f"{name}_loss": means["loss"], f"{name}_accuracy": means["accuracy"], f"{name}_majority": majority}

    def report(self, name: str, scores: Mapping[str, float]) -> list[str]:
        """Returns one line."""
        accuracy, majority = (scores[f"{name}_{metric}"] for metric in ("accuracy", "majority"))
        return [f"held-out {self.title}: accuracy {accuracy:.1%}; always the more frequent class {majority:.1%}"]

    def baselines(self, batch: dict, weights: "jax.Array", statistics: None) -> Metrics:
        """Returns the number of pairs with label 1, for the majority baseline."""
        return {"label_1": (weights * batch["pair_labels"]).sum()}


class PairObjective(Objective):
    """Classifies pairs of segments into the two classes of `pair_labels`.

    Attributes:
      pairs: the value of `data.next_sentence` that the objective needs, such as "order".
    """

    pairs: ClassVar[str]

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns the classifier of the pooled output."""
        from bertjax.nn.heads import NextSentenceHead

        return {"next_sentence": NextSentenceHead(config)}

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the cross-entropy and the accuracy."""
        from bertjax.objectives.parts.pretraining_model import weighted_cross_entropy

        return weighted_cross_entropy(
            encoded.heads["next_sentence"](encoded.pooled()), encoded.batch["pair_labels"], weights
        )

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the pooler and the classifier."""
        from bertjax.nn.heads import pooled_flops

        return pooled_flops(config, row.sequences)

    def validate(self, config: "ConfigDict") -> None:
        """Checks that `data.next_sentence` is `pairs`."""
        remedy = f"objective = {config.objective!r} needs {self.pairs}; set {self.pairs}, or change the objective"
        require(config.data.next_sentence == self.pairs, "data.next_sentence", config.data.next_sentence, remedy)
