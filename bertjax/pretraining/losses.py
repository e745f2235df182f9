"""The loss of a stage of pre-training: the weighted sum of its objectives."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.distributed.mesh import compute_on
from bertjax.models import families
from bertjax.models.families import recurrent_family_of
from bertjax.models.heads import cast_encoder
from bertjax.nn.ops.dropout import fold_in, row_keys
from bertjax.objectives.objective import Term
from bertjax.objectives.parts.pretraining_model import PretrainingModel
from bertjax.training.task import Loss

# `fold_in` of this number derives the random keys of the objectives from the keys of the rows. Layers have lower
# numbers.
OBJECTIVES_KEY = 1 << 16


@dataclasses.dataclass(frozen=True)
class StageLoss(Loss):
    """The loss of a stage. Equal losses share compiled programs.

    Attributes:
      model: the encoder and the heads of the objectives of the stage.
    """

    model: PretrainingModel

    @property
    def terms(self) -> tuple[Term, ...]:
        """The objectives of the stage."""
        return self.model.terms

    def weights(self, batch: dict) -> dict[str, jax.Array]:
        """Returns {objective: weights of its predictions}."""
        return {term.name: term.objective.weights(batch) for term in self.terms}

    def normalize(self, batch: dict) -> dict:
        """Returns the batch with `weights` for which the losses of the microbatches sum to the batch's mean loss."""
        weights = {}
        for name, _, objective in self.terms:
            values = objective.weights(batch)
            weights[name] = values / objective.normalizer(values)
        return {**batch, "weights": weights}

    def cast(self, params: dict) -> dict:
        """Casts the parameters of the encoder to the dtype of the computation."""
        return cast_encoder(params, self.model.compute.dtype)

    def __call__(self, params: dict, batch: dict, dropout_keys: jax.Array | None = None) -> tuple[jax.Array, dict]:
        """Returns the loss and {metric: value}, sums over the rows. `carry` is the carry for the next step.

        Args:
          params: cast parameters.
          batch: the arrays of a batch, with or without `weights` of `normalize`.
          dropout_keys: `[rows]` random keys; None for no dropout.
        """
        keys = fold_in(dropout_keys, OBJECTIVES_KEY)
        if keys is None:
            keys = row_keys(jax.random.key(0), jnp.arange(len(batch["input_ids"])))
        weights = batch["weights"] if "weights" in batch else self.weights(batch)
        losses, carry = self.model.apply({"params": params}, batch, weights, dropout_keys, keys)
        tokens = (batch["segments"] > 0).sum().astype(jnp.float32)
        total, metrics = jnp.float32(0), {"tokens": tokens, "padding": batch["segments"].size - tokens}
        for name, weight, _ in self.terms:
            loss, sums = losses[name]
            total = total + (loss if weight == 1 else weight * loss)
            metrics |= {f"{name}_{metric}": value for metric, value in {"loss": loss, **sums}.items()}
        return total, metrics if carry is None else metrics | {"carry": carry}


def init_carry(model: PretrainingModel, rows: int) -> Any:
    """Returns the initial, empty recurrent memory. Raises `UserError` if the model family is not recurrent."""
    return recurrent_family_of(model.config).new_memory(model.config, rows, model.compute.dtype)


def make_loss(config: ConfigDict, mesh: Mesh, terms: Sequence[Term]) -> StageLoss:
    """Returns the loss of a sum of objectives, with the model and the settings of a config."""
    model = PretrainingModel(families.config_of(config), tuple(terms), compute_on(mesh, config), config.z_loss)
    return StageLoss(model)
