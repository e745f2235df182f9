"""The input of an objective: a batch, the encoder, and the hidden states."""

from typing import NamedTuple

import flax.linen as nn
import jax


class EncodedBatch(NamedTuple):
    """A batch and the hidden states of its tokens. In `JointModel.rewrite`, the hidden states are None.

    Attributes:
      batch: {name: array}. The arrays of `bertjax.data.batch.RECORD_ARRAYS` and of the transforms of the objectives;
        `original_ids` if a joint model has replaced `input_ids`; `progress` `[rows]` in training with auxiliary
        objectives, the fraction of the steps of the run that are finished. In packed batches, `segments` numbers the
        sequences of a row from 1, and arrays per sequence are `[rows, sequences]`.
      encoder: the encoder, bound to its parameters.
      heads: {name: head} of the objective, bound to their parameters.
      hidden: the hidden states of the last layer `[rows, length, hidden]`; None in `JointModel.rewrite`.
      dropout_keys: `[rows]` random keys; None in evaluation.
      z_loss: the weight of the z-loss, see `parts.pretraining_model.weighted_cross_entropy`; 0 in evaluation.
      layer_states: `[layers + 1, rows, length, hidden]`, the embeddings and the hidden states of each layer; None in
        evaluation, and without auxiliary objectives.
      query_states: the hidden states of the query stream `[rows, predictions, hidden]`; None without a `QueryStream`.
      joint_loss: the loss and the metrics that `JointModel.rewrite` has computed; None without a `JointModel`.
    """

    batch: dict
    encoder: nn.Module
    heads: dict[str, nn.Module]
    hidden: jax.Array | None
    dropout_keys: jax.Array | None
    z_loss: float = 0.0
    layer_states: jax.Array | None = None
    query_states: jax.Array | None = None
    joint_loss: tuple[jax.Array, dict[str, jax.Array]] | None = None

    def pooled(self) -> jax.Array:
        """Returns the pooled output of each sequence: `[rows, hidden]`, or `[rows, sequences, hidden]` if packed."""
        return self.encoder.pool(self.hidden, self.batch["segments"], self.batch.get("first_tokens"))
