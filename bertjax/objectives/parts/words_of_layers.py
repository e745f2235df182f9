"""Tokens that several layers of a model predict, each layer with output matrices of its own."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import BertConfig, Compute
from bertjax.nn.encoder import stacked
from bertjax.nn.heads import decoded
from bertjax.objectives.parts.pretraining_model import classified


class WordsOfLayers(nn.Module):
    """The loss of the predictions of some layers: logistic regressions of their states.

    Attributes:
      config: the config of the model.
      compute: how to compute.
      layers: the number of layers.
      targets: the number of tokens that each position predicts.
    """

    config: BertConfig
    compute: Compute
    layers: int
    targets: int

    @nn.compact
    def __call__(
        self, states: jax.Array, positions: jax.Array, words: jax.Array, weights: jax.Array, z_loss: float
    ) -> jax.Array:
        """Returns the weighted sum of the cross-entropies. The logits of two layers never exist together.

        Args:
          states: `[layers, rows, length, hidden]`.
          positions: `[rows, predictions]`, the positions of the states that predict.
          words: `[rows, predictions, targets]`.
          weights: `[layers, rows, predictions, targets]`.
          z_loss: see `classified`.
        """
        recomputed = nn.remat(_WordsOfLayer, prevent_cse=False)
        make = stacked(recomputed, self.layers, (0, 0, nn.broadcast, nn.broadcast), self.compute, trains=False)
        layers = make(self.config, self.compute, self.targets, z_loss, name="layers")
        return layers(jnp.float32(0), states, weights, positions, words)[0]


class _WordsOfLayer(nn.Module):
    config: BertConfig
    compute: Compute
    targets: int
    z_loss: float

    @nn.compact
    def __call__(
        self, total: jax.Array, states: jax.Array, weights: jax.Array, positions: jax.Array, words: jax.Array
    ) -> tuple[jax.Array, None]:
        size, axes = self.config.padded_vocab_size, (None, "vocab", "embed")
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        shape = (self.targets, size, states.shape[-1])
        kernel: Any = self.param("kernel", nn.with_logical_partitioning(init, axes), shape)
        bias_init = nn.with_logical_partitioning(nn.initializers.zeros, axes[:2])
        bias: Any = self.param("bias", bias_init, shape[:2])
        hidden = jnp.take_along_axis(states, positions[:, :, None], axis=1)
        for target in range(self.targets):
            logits = decoded(hidden, kernel[target], bias[target], self.config, self.compute)
            total += classified(logits, words[..., target], weights[..., target], self.z_loss)[0]
        return total, None


def words_ahead(batch: dict, weights: jax.Array, targets: int) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens 1, 2, ... places ahead of each position and their weights, `[rows, predictions, targets]`.

    A token of another sequence of the row has the weight 0.

    Args:
      batch: the arrays of the predictions, see `bertjax.data.batch.WORD_ARRAYS`.
      weights: `[rows, predictions]`, of the next tokens.
      targets: the number of tokens ahead.
    """
    positions, words, is_there = batch["word_positions"], batch["word_ids"], batch["word_weights"] > 0

    def shifted(x: jax.Array, places: int) -> jax.Array:
        return jnp.pad(x[:, places:], ((0, 0), (0, places)))

    def weight(places: int) -> jax.Array:
        # No position predicts at the end of a sequence, so that the next sequence begins further away.
        return weights * (shifted(is_there, places) & (shifted(positions, places) == positions + places))

    columns = [(shifted(words, places), weight(places)) for places in range(targets)]
    all_words, all_weights = zip(*columns)
    return jnp.stack(all_words, axis=-1), jnp.stack(all_weights, axis=-1)
