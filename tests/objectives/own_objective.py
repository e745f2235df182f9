"""An objective as somebody outside the package would write it: how many tokens a text has, and whether one of its
tokens, chosen at random, is among the first half of the vocabulary."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config.model_config import BertConfig, Compute
from bertjax.data.loading.transforms import Addition
from bertjax.objectives.objective import Objective, Plot, Statistics


class Counter(nn.Module):
    """`[..., hidden]` -> a number, and a logit for the token."""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(self, pooled):
        kernel = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("embed", None))
        return nn.Dense(2, kernel_init=kernel, name="dense")(pooled)


def _addition(config, stage, tokenizer):
    """The number of tokens, in hundreds; and one of the token ids, by a random number of the host."""

    def add(batch, drawn):
        inside = batch["segments"] > 0
        chosen = (drawn["place"] * inside.sum(1)).astype(int)
        ids = np.take_along_axis(batch["input_ids"], chosen[:, None], 1)[:, 0]
        return {"count": (inside.sum(1) / 100).astype(np.float32), "chosen_id": ids, "inside": inside.astype(np.int32)}

    return Addition(add, lambda rng, rows, length: {"place": rng.random(rows)})


def _loss(encoded, weights, keys):
    found, batch = encoded.heads["counter"](encoded.pooled()), encoded.batch
    noise = jax.vmap(lambda key: jax.random.normal(key, ()))(keys)
    noise = noise.reshape(noise.shape + (1,) * (weights.ndim - 1)) * jnp.ones_like(weights)
    errors = jnp.abs(found[..., 0] + 0.001 * noise - batch["count"])
    is_low = (batch["chosen_id"] < encoded.encoder.config.vocab_size // 2).astype(jnp.float32)
    losses = errors**2 + 0.1 * jnp.abs(nn.sigmoid(found[..., 1]) - is_low)
    metrics = {"error": errors, "noise": noise, "tokens": 100 * batch["count"]}
    return (weights * losses).sum(), {name: (weights * values).sum() for name, values in metrics.items()}


def _scores(name, means):
    return {f"{name}_loss": means["loss"], f"{name}_noise": means["noise"], f"{name}_mean_loss": means["mean_loss"]}


def _report(name, scores):
    return [f"held-out counts: loss {scores[f'{name}_loss']:.4f}, of the mean {scores[f'{name}_mean_loss']:.4f}"]


def _mean(config, batches):
    return np.float32(np.mean([batch["count"].mean() for batch in batches]))


OBJECTIVE = Objective(
    loss=_loss,
    scores=_scores,
    report=_report,
    heads=lambda config, compute: {"counter": Counter(config, compute)},
    baselines=lambda batch, weights, mean: {"mean_loss": (weights * (batch["count"] - mean) ** 2).sum()},
    statistics=Statistics(lambda config: (), _mean),
    adds={"count": ("sequence", np.float32), "chosen_id": ("sequence", np.int32), "inside": ("token", np.int32)},
    addition=_addition,
    flops=lambda config, row: row.sequences * 2 * config.hidden_size * (config.hidden_size + 2),
    plots=[Plot("loss of counts", "loss", "{name}_mean_loss")],
)
