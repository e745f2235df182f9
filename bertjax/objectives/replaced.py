"""Replaced words: which tokens of a text are those of the text, and which have been put in their place by an objective
that rewrites it (ELECTRA; Clark et al. 2020, section 2). All tokens count, [CLS] and [SEP] too, as in Google's code."""

import math
from collections.abc import Mapping

from bertjax.config.limits import require
from bertjax.objectives.objective import Objective, Plot
from bertjax.objectives.parsing import parse_objective


def _heads(config, compute) -> dict:
    from bertjax.nn.heads import ReplacedTokensHead

    return {"replaced_tokens": ReplacedTokensHead(config, compute)}


def _loss(encoded, weights, keys):
    """Returns the sums of the cross-entropy, of correct answers, of replaced words, and of those that are found."""
    import jax.numpy as jnp
    import optax

    del keys
    batch, logits = encoded.batch, encoded.heads["replaced_tokens"](encoded.hidden)
    is_replaced, is_said = batch["input_ids"] != batch["original_ids"], logits > 0
    losses = optax.sigmoid_binary_cross_entropy(logits, is_replaced.astype(jnp.float32))
    metrics = {"accuracy": is_replaced == is_said, "share": is_replaced, "found": is_replaced & is_said}
    return (weights * losses).sum(), {name: (weights * x).sum() for name, x in metrics.items()}


def _weights(batch):
    return (batch["segments"] > 0).astype("float32")


def _scores(name: str, means: dict[str, float]) -> dict[str, float]:
    """Scores replaced and original tokens apart as well: most tokens are original."""
    share, found, accuracy = means["share"], means["found"], means["accuracy"]
    entropy = -sum(x * math.log(x) for x in (share, 1 - share) if x > 0)
    return {
        f"{name}_loss": means["loss"],
        f"{name}_share_loss": entropy,  # what always giving the share as the probability costs
        f"{name}_accuracy": accuracy,
        f"{name}_majority": max(share, 1 - share),
        f"{name}_share": share,
        f"{name}_found": found,
        f"{name}_accuracy_at_replaced": found / share if share else 1.0,
        f"{name}_accuracy_at_original": (accuracy - found) / (1 - share) if share < 1 else 1.0,
    }


def _report(name: str, scores: Mapping[str, float]) -> list[str]:
    loss, share_loss, accuracy, majority, share, at_replaced, at_original = (
        scores[f"{name}_{score}"]
        for score in (
            "loss", "share_loss", "accuracy", "majority", "share", "accuracy_at_replaced", "accuracy_at_original",
        )
    )  # fmt: skip
    comparison = f"{abs(share_loss - loss):.3f} {'better' if loss < share_loss else 'worse'} than it"
    title = "held-out replaced words: "
    return [
        f"{title}loss {loss:.3f} nats; of always giving their share, {share:.1%}, {share_loss:.3f} ({comparison})",
        f"{'':{len(title)}}accuracy {accuracy:.1%}; always the more frequent answer {majority:.1%}",
        f"{'':{len(title)}}of the replaced {at_replaced:.1%} are found, of the others {at_original:.1%} are left alone",
    ]


def _flops(config, row) -> int:
    return 2 * row.tokens * config.hidden_size * (config.hidden_size + 1)


def _validate(config) -> None:
    terms = parse_objective(config)
    remedy = "nothing replaces words: write '50*replaced + generator'"
    require(any(term.objective.rewrite for term in terms), "objective", config.objective, remedy)
    rises = (
        "goes by the loss of replaced, the first objective, which can rise as words become harder to tell; set 0, "
        "or write 'generator + 50*replaced'"
    )
    is_judge = terms[0].objective.loss is _loss
    require(not (config.eval.patience and is_judge), "eval.patience", config.eval.patience, rises)


OBJECTIVE = Objective(
    loss=_loss,
    scores=_scores,
    report=_report,
    heads=_heads,
    weights=_weights,
    flops=_flops,
    validate=_validate,
    plots=(
        Plot("loss of replaced words", "loss", "{name}_share_loss", is_main=True),
        Plot("accuracy of replaced words", "accuracy", "{name}_majority"),
        Plot("replaced words that are found, of all words", "found", "{name}_share"),
    ),
)
