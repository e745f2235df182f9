"""A batch that the encoder has read: the input of each objective."""

from typing import NamedTuple

import flax.linen as nn
import jax


class EncodedBatch(NamedTuple):
    """A batch that the encoder has read, or, for `Objective.rewrite`, is about to read.

    Attributes:
      batch: its arrays: `input_ids`, `segments`, `token_types` `[rows, length]`, `pair_labels`, `sequence_weights`
        `[rows]`, what is predicted of words (`word_positions`, `word_ids`, `word_weights` `[rows, predictions]`), and
        what objectives added; `original_ids` if one has rewritten `input_ids`; in training, if auxiliary objectives are
        learnt, `progress` `[rows]`, the share of all steps that are done. In packed batches `segments` numbers the
        sequences of a row from 1, what is per sequence is `[rows, sequences]`, and there are `positions` and
        `first_tokens` (of each sequence).
      encoder: a module, bound to its params.
      heads: {name: module} of the objective, bound to their params.
      hidden: `[rows, length, hidden]`; None if it has not been read.
      of_words: states that predict words `[rows, predictions, hidden]`, if they are others, see `Objective.encode`.
      dropout_keys: `[rows]`; None in evaluation.
      z_loss: weight of what keeps the logits of words small, see `classified`; 0 in evaluation.
      states: `[layers + 1, rows, length, hidden]`, the embeddings first; None unless there is `progress`.
    """

    batch: dict
    encoder: nn.Module
    heads: dict[str, nn.Module]
    hidden: jax.Array | None
    dropout_keys: jax.Array | None
    z_loss: float = 0.0
    states: jax.Array | None = None
    of_words: jax.Array | None = None

    def pooled(self) -> jax.Array:
        """Returns the pooled output `[rows, hidden]`, or if sequences share rows `[rows, sequences, hidden]`."""
        return self.encoder.pool(self.hidden, self.batch["segments"], self.batch.get("first_tokens"))
