"""The loss of a training step of fine-tuning."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.inference import losses
from bertjax.inference.heads import Head
from bertjax.inference.losses import LabelLoss
from bertjax.inference.predictor import apply_model
from bertjax.models.heads import cast_encoder
from bertjax.training.task import CoupledLoss


class FineTuningLoss(CoupledLoss):
    """The loss of a head.

    Attributes:
      model: the encoder with the head.
      head: the head.
      label_loss: compares the outputs of the model with the labels.
    """

    def __init__(self, model: nn.Module, head: Head, label_loss: LabelLoss) -> None:
        self.model, self.head, self.label_loss = model, head, label_loss
        self.couples_rows = losses.couples_rows(label_loss)

    def normalize(self, batch: dict) -> dict:
        """Returns the batch with normalized `weights` and `loss_weights`."""
        weights, total = batch["weights"], losses.prediction_weights(self.label_loss, batch).sum()
        return {
            **batch,
            "weights": weights / jnp.maximum(weights.sum(), 1),
            "loss_weights": weights / jnp.where(total > 0, total, 1),
        }

    def cast(self, params: dict) -> dict:
        """Casts the params of the encoder to the dtypes that the model computes with."""
        return cast_encoder(params, self.model.compute.dtype)

    def __call__(self, params: dict, batch: dict, dropout_keys: jax.Array | None = None) -> tuple[jax.Array, dict]:
        """Returns the loss and the metrics, see `Loss.__call__`."""
        return self.loss_of_outputs(self.outputs(params, batch, dropout_keys), batch)

    def outputs(self, params: dict, batch: dict, dropout_keys: jax.Array | None = None) -> jax.Array:
        """Returns the outputs of the head `[rows, ...]`."""
        return apply_model(self.model, self.head.pooled, params, batch, dropout_keys)

    def loss_of_outputs(self, outputs: jax.Array, batch: dict) -> tuple[jax.Array, dict]:
        """Returns the loss and the metrics of outputs."""
        label_losses, correct = self.label_loss(outputs, batch)
        tokens = (batch["segments"] > 0).sum().astype(jnp.float32)
        padding = batch["segments"].size - tokens
        return (batch["loss_weights"] * label_losses).sum(), {
            "accuracy": (batch["weights"] * correct).sum(),
            "tokens": tokens,
            "padding": padding,
        }
