"""A user-defined objective: predicts the number of tokens of a text, and whether a random token of the text is in the
first half of the vocabulary.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config.model_config import BertConfig, Compute
from bertjax.data.batch import BatchSpec, per_sequence, per_token
from bertjax.data.loading.transforms import BatchTransform
from bertjax.objectives.objective import Objective, ObjectiveMetrics, Plot


class Counter(nn.Module):
    """Returns a number, and a logit for the token, from pooled outputs `[..., hidden]`."""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(self, pooled):
        kernel = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("embed", None))
        return nn.Dense(2, kernel_init=kernel, name="dense")(pooled)


class CountTokens(BatchTransform):
    """Adds the number of tokens in hundreds, and one token id, chosen by a random number of the host."""

    def draw(self, rng, rows, length):
        return {"place": rng.random(rows)}

    def __call__(self, batch, draws):
        inside = batch["segments"] > 0
        chosen = (draws["place"] * inside.sum(1)).astype(int)
        ids = np.take_along_axis(batch["input_ids"], chosen[:, None], 1)[:, 0]
        return {"count": (inside.sum(1) / 100).astype(np.float32), "chosen_id": ids, "inside": inside.astype(np.int32)}


class CountMetrics(ObjectiveMetrics):
    """The loss, and the loss of the mean count as a baseline."""

    plots = (Plot("loss of counts", "loss", "{name}_mean_loss"),)

    def scores(self, name, means):
        return {f"{name}_loss": means["loss"], f"{name}_noise": means["noise"], f"{name}_mean_loss": means["mean_loss"]}

    def report(self, name, scores):
        return [f"held-out counts: loss {scores[f'{name}_loss']:.4f}, of the mean {scores[f'{name}_mean_loss']:.4f}"]

    def baselines(self, batch, weights, statistics):
        return {"mean_loss": (weights * (batch["count"] - statistics) ** 2).sum()}

    def statistics_shape(self, config):
        return ()

    def measure_statistics(self, config, batches):
        return np.float32(np.mean([batch["count"].mean() for batch in batches]))


class Count(Objective):
    """Predicts the number of tokens."""

    metrics = CountMetrics()

    def batch_spec(self, config, stage):
        return BatchSpec(count=per_sequence(np.float32), chosen_id=per_sequence(), inside=per_token())

    def transform(self, config, stage, tokenizer):
        return CountTokens()

    def heads(self, config, compute):
        return {"counter": Counter(config, compute)}

    def loss(self, encoded, weights, keys):
        outputs, batch = encoded.heads["counter"](encoded.pooled()), encoded.batch
        noise = jax.vmap(lambda key: jax.random.normal(key, ()))(keys)
        noise = noise.reshape(noise.shape + (1,) * (weights.ndim - 1)) * jnp.ones_like(weights)
        errors = jnp.abs(outputs[..., 0] + 0.001 * noise - batch["count"])
        is_low = (batch["chosen_id"] < encoded.encoder.config.vocab_size // 2).astype(jnp.float32)
        losses = errors**2 + 0.1 * jnp.abs(nn.sigmoid(outputs[..., 1]) - is_low)
        metrics = {"error": errors, "noise": noise, "tokens": 100 * batch["count"]}
        return (weights * losses).sum(), {name: (weights * values).sum() for name, values in metrics.items()}

    def flops(self, config, row):
        return row.sequences * 2 * config.hidden_size * (config.hidden_size + 2)


OBJECTIVE = Count()
