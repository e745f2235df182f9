"""Replaced token detection (ELECTRA; Clark et al. 2020, section 2).

Each token is classified as original, or as replaced by the generator. The loss includes [CLS] and [SEP], as in Google's
code.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, Compute
from bertjax.data.batch import RowSize
from bertjax.objectives.objective import JointModel, Metrics, Objective, ObjectiveMetrics, Plot
from bertjax.objectives.parsing import parse_objective

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from ml_collections import ConfigDict

    from bertjax.objectives.encoded_batch import EncodedBatch


class ReplacedMetrics(ObjectiveMetrics):
    """Accuracies of the replaced and of the original tokens, because most tokens are original."""

    plots = (
        Plot("loss of replaced words", "loss", "{name}_share_loss", is_main=True),
        Plot("accuracy of replaced words", "accuracy", "{name}_majority"),
        Plot("replaced words that are found, of all words", "found", "{name}_share"),
    )

    def scores(self, name: str, means: Mapping[str, float]) -> dict[str, float]:
        """Returns the loss, the accuracies and the baselines.

        `share` is the number of replaced tokens / all tokens, and `found` the number of replaced tokens that are
        predicted as replaced / all tokens. `accuracy_at_replaced` and `accuracy_at_original` are recalls.
        """
        share, detected, accuracy = means["share"], means["found"], means["accuracy"]
        entropy = -sum(x * math.log(x) for x in (share, 1 - share) if x > 0)
        return {
            f"{name}_loss": means["loss"],
            f"{name}_share_loss": entropy,  # the loss if `share` is the predicted probability of each token
            f"{name}_accuracy": accuracy,
            f"{name}_majority": max(share, 1 - share),
            f"{name}_share": share,
            f"{name}_found": detected,
            f"{name}_accuracy_at_replaced": detected / share if share else 1.0,
            f"{name}_accuracy_at_original": (accuracy - detected) / (1 - share) if share < 1 else 1.0,
        }

    def report(self, name: str, scores: Mapping[str, float]) -> list[str]:
        """Returns three lines."""
        loss, share_loss, accuracy = (scores[f"{name}_{score}"] for score in ("loss", "share_loss", "accuracy"))
        majority, share = scores[f"{name}_majority"], scores[f"{name}_share"]
        at_replaced, at_original = (scores[f"{name}_accuracy_at_{group}"] for group in ("replaced", "original"))
        comparison = f"{abs(share_loss - loss):.3f} {'better' if loss < share_loss else 'worse'}"
        title, indent = "held-out replaced words: ", " " * len("held-out replaced words: ")
        return [
            f"{title}loss {loss:.3f} nats; always predicting their share {share:.1%}: {share_loss:.3f} ({comparison})",
            f"{indent}accuracy {accuracy:.1%}; always the more frequent class {majority:.1%}",
            f"{indent}recall: {at_replaced:.1%} of the replaced words, {at_original:.1%} of the original words",
        ]


class ReplacedTokenDetection(Objective):
    """Classifies each token as original or replaced."""

    metrics = ReplacedMetrics()

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns the classifier of tokens."""
        from bertjax.nn.heads import ReplacedTokensHead

        return {"replaced_tokens": ReplacedTokensHead(config, compute)}

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the cross-entropy, and the weighted counts of the metrics, see `ReplacedMetrics.scores`."""
        import jax.numpy as jnp
        import optax

        batch, logits = encoded.batch, encoded.heads["replaced_tokens"](encoded.hidden)
        is_replaced, is_predicted = batch["input_ids"] != batch["original_ids"], logits > 0
        losses = optax.sigmoid_binary_cross_entropy(logits, is_replaced.astype(jnp.float32))
        metrics = {
            "accuracy": is_replaced == is_predicted,
            "share": is_replaced,
            "found": is_replaced & is_predicted,
        }
        return (weights * losses).sum(), {name: (weights * x).sum() for name, x in metrics.items()}

    def weights(self, batch: dict) -> "jax.Array":
        """Returns 1 for each token and 0 for padding, `[rows, length]`."""
        return (batch["segments"] > 0).astype("float32")

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the classifier."""
        return 2 * row.tokens * config.hidden_size * (config.hidden_size + 1)

    def validate(self, config: "ConfigDict") -> None:
        """Checks that a joint model replaces tokens, and that early stopping reads the loss of another objective."""
        terms = parse_objective(config)
        remedy = "replaced needs an objective that replaces tokens; set '50*replaced + generator'"
        require(any(isinstance(term.objective, JointModel) for term in terms), "objective", config.objective, remedy)
        remedy = (
            "early stopping reads the loss of the first objective, and the loss of replaced can rise as the generator "
            "improves; set 0, or set objective = 'generator + 50*replaced'"
        )
        is_first = isinstance(terms[0].objective, ReplacedTokenDetection)
        require(not (config.eval.patience and is_first), "eval.patience", config.eval.patience, remedy)


OBJECTIVE = ReplacedTokenDetection()
