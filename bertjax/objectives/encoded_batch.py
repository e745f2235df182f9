"""A batch with the hidden states of its tokens: the input of each objective."""

from typing import NamedTuple

import flax.linen as nn
import jax


class EncodedBatch(NamedTuple):
    """A batch that the encoder has read. For `JointModel.rewrite`, the encoder has not read the batch yet.

    Attributes:
      batch: the arrays of the batch: `bertjax.data.batch.RECORD_ARRAYS`, the arrays that transforms of objectives add,
        `original_ids` if a joint model has replaced `input_ids`, and in training with auxiliary objectives `progress`
        `[rows]`, the share of all steps that are done. In packed batches `segments` numbers the sequences of a row
        from 1, and arrays per sequence are `[rows, sequences]`.
      encoder: the encoder, bound to its parameters.
      heads: {name: module}, the output layers of the objective, bound to their parameters.
      hidden: the last hidden states `[rows, length, hidden]`; None before the encoder has read the batch.
      dropout_keys: `[rows]` random keys; None in evaluation.
      z_loss: the weight of the z-loss, see `parts.pretraining_model.classified`; 0 in evaluation.
      states: `[layers + 1, rows, length, hidden]`, the embeddings and the states of each layer; None without
        `progress`.
      query_states: the states of a `QueryStream` `[rows, predictions, hidden]`; None if the hidden states predict.
      joint_loss: the loss and the metrics of a `JointModel`, which its `rewrite` computes.
    """

    batch: dict
    encoder: nn.Module
    heads: dict[str, nn.Module]
    hidden: jax.Array | None
    dropout_keys: jax.Array | None
    z_loss: float = 0.0
    states: jax.Array | None = None
    query_states: jax.Array | None = None
    joint_loss: tuple[jax.Array, dict[str, jax.Array]] | None = None

    def pooled(self) -> jax.Array:
        """Returns the pooled output `[rows, hidden]`, or of packed rows `[rows, sequences, hidden]`."""
        return self.encoder.pool(self.hidden, self.batch["segments"], self.batch.get("first_tokens"))
