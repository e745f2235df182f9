"""Auxiliary losses of causal language models (Al-Rfou et al. 2019, section "Auxiliary Losses").

Intermediate layers also predict the next token, and each position also predicts tokens that are further ahead.

Each layer has an output matrix for each distance. The predictions are made in training only; the objective `lm`
predicts the next token from the last layer, and is evaluated. Set `config.objective` to "lm + auxiliary".
"""

import dataclasses
from typing import TYPE_CHECKING

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, Compute, field
from bertjax.data.batch import RowSize
from bertjax.objectives.lm import OBJECTIVE as CAUSAL_LM
from bertjax.objectives.objective import AuxiliaryObjective, Metrics, ObjectiveMetrics, Plot
from bertjax.objectives.parsing import parse_objective

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from ml_collections import ConfigDict

    from bertjax.objectives.encoded_batch import EncodedBatch

# The parameter names of the heads: for all intermediate layers, and for the last layer.
INTERMEDIATE, LAST = "words_of_layers", "further_words"


class AuxiliaryMetrics(ObjectiveMetrics):
    """Plots the training loss. Auxiliary objectives are not evaluated."""

    plots = (Plot("sum of the auxiliary losses", "loss"),)


@dataclasses.dataclass(frozen=True)
class AuxiliaryLosses(AuxiliaryObjective):
    """Predicts the next tokens from intermediate layers, and tokens further ahead from all layers.

    Attributes:
      layers_until: layer l of n layers has a loss during the first fraction `layers_until` * l / n of the steps. 0:
        only the last layer has a loss.
      targets: the number of tokens that a position predicts: the tokens 1, 2, ..., `targets` positions ahead.
      target_weight: the weight of the losses of the tokens that are more than one position ahead.
    """

    layers_until: float = field(0.5, least=0, most=1)
    targets: int = field(2, least=1, most=64)
    target_weight: float = field(0.5, above=0, most=1)

    metrics = AuxiliaryMetrics()

    def _head_sizes(self, config: BertConfig) -> dict[str, tuple[int, int]]:
        """Returns {parameter name: (number of layers, tokens that a position predicts)} of the heads."""
        intermediate = config.num_hidden_layers - 1 if self.layers_until else 0
        sizes = {INTERMEDIATE: (intermediate, self.targets), LAST: (1, self.targets - 1)}
        return {name: size for name, size in sizes.items() if all(size)}

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns the heads."""
        from bertjax.objectives.parts.layerwise_loss import LayerwiseTokenLoss

        return {name: LayerwiseTokenLoss(config, compute, *size) for name, size in self._head_sizes(config).items()}

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the sum of the losses of all layers, a scalar, and no metrics."""
        import jax.numpy as jnp

        from bertjax.objectives.parts.layerwise_loss import targets_ahead

        assert encoded.layer_states is not None
        batch, heads, count = encoded.batch, encoded.heads, len(encoded.layer_states) - 1
        targets, target_weights = targets_ahead(batch, weights, self.targets)
        target_weights *= jnp.where(jnp.arange(self.targets) > 0, self.target_weight, 1.0)
        total = jnp.float32(0)
        positions = batch["word_positions"]
        if INTERMEDIATE in heads:
            ends = self.layers_until * jnp.arange(1, count) / count
            is_active = batch["progress"] < ends[:, None]  # [layers, rows]
            layer_weights = is_active[:, :, None, None] * target_weights
            total += heads[INTERMEDIATE](encoded.layer_states[1:-1], positions, targets, layer_weights, encoded.z_loss)
        if LAST in heads:  # `lm` predicts the next token
            further = targets[..., 1:], target_weights[None, ..., 1:]
            total += heads[LAST](encoded.layer_states[-1:], positions, *further, encoded.z_loss)
        return total, {}

    def weights(self, batch: dict) -> "jax.Array":
        """Returns the weights of `lm`."""
        return CAUSAL_LM.weights(batch)

    def normalizer(self, weights: "jax.Array") -> "jax.Array":
        """Returns the normalizer of `lm`."""
        return CAUSAL_LM.normalizer(weights)

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of all output matrices. Counts all layers in all steps."""
        matrices = sum(layers * targets for layers, targets in self._head_sizes(config).values())
        return 2 * row.predictions * config.hidden_size * config.padded_vocab_size * matrices

    def validate(self, config: "ConfigDict") -> None:
        """Checks that `lm` is in the sum, and that the settings define at least one prediction."""
        names = [term.name for term in parse_objective(config)]
        remedy = "auxiliary needs the objective lm; set 'lm + auxiliary'"
        require("lm" in names, "objective", config.objective, remedy)
        has_predictions = self.layers_until > 0 or self.targets > 1
        remedy = (
            "auxiliary has no loss if targets = 1; set layers_until above 0, set targets above 1, or remove auxiliary"
        )
        require(has_predictions, "objectives.auxiliary.layers_until", self.layers_until, remedy)


OBJECTIVE = AuxiliaryLosses()
