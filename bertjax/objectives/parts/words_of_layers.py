"""Words that the layers of a model predict, each with output layers of its own."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import BertConfig, Compute
from bertjax.nn.encoder import stacked
from bertjax.nn.heads import decoded
from bertjax.objectives.parts.pretraining_model import classified


class WordsOfLayers(nn.Module):
    """The loss of what some layers predict: logistic regressions of their states.

    Args:
      layers: how many there are.
      targets: words that each position predicts.
    """

    config: BertConfig
    compute: Compute
    layers: int
    targets: int

    @nn.compact
    def __call__(self, states, positions, words, weights, z_loss: float):
        """Returns the weighted sum of the cross-entropies. No two layers' logits exist together.

        Args:
          states: `[layers, rows, length, hidden]`.
          positions: `[rows, predictions]`, of the states that predict.
          words: `[rows, predictions, targets]`.
          weights: `[layers, rows, predictions, targets]`.
          z_loss: see `classified`.
        """
        recomputed = nn.remat(_WordsOfLayer, prevent_cse=False)
        make = stacked(recomputed, self.layers, (0, 0, nn.broadcast, nn.broadcast), self.compute, trains=False)
        each = make(self.config, self.compute, self.targets, z_loss, name="layers")
        return each(jnp.float32(0), states, weights, positions, words)[0]


class _WordsOfLayer(nn.Module):
    config: BertConfig
    compute: Compute
    targets: int
    z_loss: float

    @nn.compact
    def __call__(self, total, states, weights, positions, words):
        size, axes = self.config.padded_vocab_size, (None, "vocab", "embed")
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        shape = (self.targets, size, states.shape[-1])
        kernel = self.param("kernel", nn.with_logical_partitioning(init, axes), shape)
        bias_init = nn.with_logical_partitioning(nn.initializers.zeros, axes[:2])
        bias = self.param("bias", bias_init, shape[:2])
        hidden = jnp.take_along_axis(states, positions[:, :, None], axis=1)
        for target in range(self.targets):
            logits = decoded(hidden, kernel[target], bias[target], self.config, self.compute)
            total += classified(logits, words[..., target], weights[..., target], self.z_loss)[0]
        return total, None


def words_ahead(batch: dict, weights: jax.Array, targets: int) -> tuple[jax.Array, jax.Array]:
    """Returns the words 1, 2, ... places ahead of each position and their weights, `[rows, predictions, targets]`.

    A word that is not in the same sequence of a row has the weight 0.

    Args:
      weights: `[rows, predictions]`, of the next words.
    """
    positions, words, is_there = batch["word_positions"], batch["word_ids"], batch["word_weights"] > 0

    def moved(x, places):
        return jnp.pad(x[:, places:], ((0, 0), (0, places)))

    def weight(places):
        # Before the end of a sequence no position predicts, so that one of the next sequence is further away.
        return weights * (moved(is_there, places) & (moved(positions, places) == positions + places))

    each = [(moved(words, places), weight(places)) for places in range(targets)]
    return tuple(jnp.stack(parts, axis=-1) for parts in zip(*each))
