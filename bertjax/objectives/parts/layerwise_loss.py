"""The token loss of several layers, with separate output matrices for each layer."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import BertConfig, Compute
from bertjax.nn.encoder import scan_layers
from bertjax.nn.heads import decoded
from bertjax.objectives.parts.pretraining_model import weighted_cross_entropy


class LayerwiseTokenLoss(nn.Module):
    """The sum of the losses of linear classifiers of the hidden states, one for each layer and target.

    Attributes:
      config: the config of the model.
      compute: the settings of the computation, such as the dtype.
      layers: the number of layers.
      targets: the number of tokens that a position predicts.
    """

    config: BertConfig
    compute: Compute
    layers: int
    targets: int

    @nn.compact
    def __call__(
        self, states: jax.Array, positions: jax.Array, words: jax.Array, weights: jax.Array, z_loss: float
    ) -> jax.Array:
        """Returns the weighted sum of the cross-entropies, a scalar. Computes the logits of one layer at a time.

        Args:
          states: `[layers, rows, length, hidden]`.
          positions: `[rows, predictions]`, the positions of the hidden states that predict.
          words: `[rows, predictions, targets]`.
          weights: `[layers, rows, predictions, targets]`.
          z_loss: see `weighted_cross_entropy`.
        """
        recomputed = nn.remat(_LayerTokenLoss, prevent_cse=False)
        make = scan_layers(recomputed, self.layers, (0, 0, nn.broadcast, nn.broadcast), self.compute, trains=False)
        layers = make(self.config, self.compute, self.targets, z_loss, name="layers")
        return layers(jnp.float32(0), states, weights, positions, words)[0]


class _LayerTokenLoss(nn.Module):
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
            total += weighted_cross_entropy(logits, words[..., target], weights[..., target], self.z_loss)[0]
        return total, None


def targets_ahead(batch: dict, weights: jax.Array, targets: int) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens 1, 2, ... positions ahead and their weights, `[rows, predictions, targets]`.

    Tokens of another sequence of the row have the weight 0.

    Args:
      batch: the predictions of the next tokens, see `bertjax.data.batch.WORD_ARRAYS`.
      weights: `[rows, predictions]`, of the next tokens.
      targets: the number of tokens ahead.
    """
    positions, words, is_valid = batch["word_positions"], batch["word_ids"], batch["word_weights"] > 0

    def shifted(x: jax.Array, places: int) -> jax.Array:
        return jnp.pad(x[:, places:], ((0, 0), (0, places)))

    def weight(places: int) -> jax.Array:
        # The last position of a sequence has no prediction, so that prediction i + places is in the same sequence only
        # if its position is `places` further.
        return weights * (shifted(is_valid, places) & (shifted(positions, places) == positions + places))

    columns = [(shifted(words, places), weight(places)) for places in range(targets)]
    all_words, all_weights = zip(*columns)
    return jnp.stack(all_words, axis=-1), jnp.stack(all_weights, axis=-1)
