"""Auxiliary losses of causal language models (Al-Rfou et al. 2019, section "Auxiliary Losses").

Intermediate layers predict as well, and each position predicts several tokens ahead.

Each layer has an output matrix for each token ahead, and predicts in training only. Evaluation reads the next tokens of
the last layer, the objective `lm`. Write "lm + auxiliary".
"""

import dataclasses
from typing import TYPE_CHECKING

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, Compute, field
from bertjax.data.batch import RowSize
from bertjax.objectives.lm import OBJECTIVE as NEXT_WORDS
from bertjax.objectives.objective import AuxiliaryObjective, Metrics, ObjectiveMetrics, Plot
from bertjax.objectives.parsing import parse_objective

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from ml_collections import ConfigDict

    from bertjax.objectives.encoded_batch import EncodedBatch

# The names of the output layers among the parameters: of the intermediate layers, and of the last layer.
LAYERS, LAST = "words_of_layers", "further_words"


class AuxiliaryMetrics(ObjectiveMetrics):
    """Plots the loss of training. There is no evaluation."""

    plots = (Plot("sum of the auxiliary losses", "loss"),)


@dataclasses.dataclass(frozen=True)
class AuxiliaryWords(AuxiliaryObjective):
    """Predicts tokens from all layers, and tokens further ahead.

    Attributes:
      layers_until: layer l of n layers predicts until the share `layers_until` * l / n of the training; 0: only the
        last layer predicts.
      targets: each position predicts the tokens 1, 2, ..., `targets` places ahead.
      target_weight: the weight of each token that is more than one place ahead.
    """

    layers_until: float = field(0.5, least=0, most=1)
    targets: int = field(2, least=1, most=64)
    target_weight: float = field(0.5, above=0, most=1)

    metrics = AuxiliaryMetrics()

    def _predicted(self, config: BertConfig) -> dict[str, tuple[int, int]]:
        """Returns {output layer: (number of layers that it reads, tokens that each position predicts)}."""
        before = config.num_hidden_layers - 1 if self.layers_until else 0
        sizes = {LAYERS: (before, self.targets), LAST: (1, self.targets - 1)}
        return {name: size for name, size in sizes.items() if all(size)}

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns the output layers."""
        from bertjax.objectives.parts.words_of_layers import WordsOfLayers

        return {name: WordsOfLayers(config, compute, *size) for name, size in self._predicted(config).items()}

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the sum of the losses of all layers."""
        import jax.numpy as jnp

        from bertjax.objectives.parts.words_of_layers import words_ahead

        assert encoded.states is not None
        batch, heads, count = encoded.batch, encoded.heads, len(encoded.states) - 1
        words, word_weights = words_ahead(batch, weights, self.targets)
        word_weights *= jnp.where(jnp.arange(self.targets) > 0, self.target_weight, 1.0)
        total = jnp.float32(0)
        if LAYERS in heads:
            ends = self.layers_until * jnp.arange(1, count) / count
            predicts = batch["progress"] < ends[:, None]  # [layers, rows]
            layer_weights = predicts[:, :, None, None] * word_weights
            total += heads[LAYERS](encoded.states[1:-1], batch["word_positions"], words, layer_weights, encoded.z_loss)
        if LAST in heads:
            further = words[..., 1:], word_weights[None, ..., 1:]
            total += heads[LAST](encoded.states[-1:], batch["word_positions"], *further, encoded.z_loss)
        return total, {}

    def weights(self, batch: dict) -> "jax.Array":
        """Returns the weights of `lm`."""
        return NEXT_WORDS.weights(batch)

    def normalizer(self, weights: "jax.Array") -> "jax.Array":
        """Returns the normalizer of `lm`."""
        return NEXT_WORDS.normalizer(weights)

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of all output matrices, as if all layers predicted in all steps."""
        predicted = sum(layers * targets for layers, targets in self._predicted(config).values())
        return 2 * row.predictions * config.hidden_size * config.padded_vocab_size * predicted

    def validate(self, config: "ConfigDict") -> None:
        """Checks that `lm` is in the sum, and that the settings leave something to predict."""
        names = [term.name for term in parse_objective(config)]
        remedy = "the objective of the last layer is missing: write 'lm + auxiliary'"
        require("lm" in names, "objective", config.objective, remedy)
        nothing = "with targets = 1 as well, nothing is predicted besides lm; choose more, or leave auxiliary out"
        is_something = self.layers_until > 0 or self.targets > 1
        require(is_something, "objectives.auxiliary.layers_until", self.layers_until, nothing)


OBJECTIVE = AuxiliaryWords()
