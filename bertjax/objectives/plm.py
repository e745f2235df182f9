"""Permutation language modelling, by a model with two streams of states (XLNet; Yang et al. 2019, sections 2.2, 2.3).

The last tokens of a random order are predicted. Each is predicted by a state that sees the tokens before it in the
order, and its own position, but not the token there. One pass predicts all of them.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, field
from bertjax.config.stages import Stage
from bertjax.data.batch import BatchSpec, RowSize, per_token
from bertjax.models import families
from bertjax.models.family import TwoStreamAttention
from bertjax.objectives.objective import Metrics, QueryStream
from bertjax.objectives.parts.words import (
    WordMetrics,
    WordObjective,
    loss_of_words,
    predictions_of_rows,
    validate_not_masked,
)

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from ml_collections import ConfigDict

    from bertjax.data.loading.transforms import BatchTransform
    from bertjax.nn.ops.recurrent_memory import Memory
    from bertjax.objectives.encoded_batch import EncodedBatch
    from bertjax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class PermutedWords(WordObjective, QueryStream):
    """Predicts tokens in a random order.

    Attributes:
      k: one in `k` tokens is predicted (K in section 2.3).
      max_span_words: the most words of a predicted span; 0 predicts single tokens.
    """

    k: int = field(6, least=1)
    max_span_words: int = field(5, least=0, most=100)

    lm_type = "permuted"
    fills_masks = True
    continues = True
    metrics = WordMetrics("permuted words")

    def predictions_per_sequence(self, config: "ConfigDict", stage: Stage) -> int:
        """Returns the field of the stage."""
        return stage.max_predictions_per_seq

    def predictions_per_row(self, config: "ConfigDict", stage: Stage, sequences: int) -> int:
        """Returns the number for one in `k` tokens."""
        return predictions_of_rows(1 / self.k, stage, sequences)

    def batch_spec(self, config: "ConfigDict", stage: Stage) -> BatchSpec:
        """Returns the predictions and `ranks`, the place of each token in the order."""
        return super().batch_spec(config, stage) | {"ranks": per_token(np.int32)}

    def transform(self, config: "ConfigDict", stage: Stage, tokenizer: "Tokenizer | None") -> "BatchTransform":
        """Returns the transform that draws an order."""
        from bertjax.data.loading.permutation import RandomOrder, rules_of

        if tokenizer is None:
            raise ValueError("permutation language modelling needs a tokenizer, which marks the beginnings of words")
        return RandomOrder(rules_of(self.k, self.max_span_words, stage.max_predictions_per_seq, tokenizer))

    def encode(
        self, encoder: "nn.Module", batch: dict, dropout_keys: "jax.Array | None", memory: "Memory | None" = None
    ) -> "tuple[jax.Array, jax.Array, Memory | None]":
        """Returns the states of both streams, see `QueryStream.encode`.

        Tokens that are not predicted have rank 0 and see each other. A predicted token sees these, and lower ranks.
        """
        ranks = batch["ranks"]
        seen = (ranks[:, None] < ranks[:, :, None]) | (ranks == 0)[:, None]
        arrays = (batch[name] for name in ("input_ids", "segments", "token_types", "word_positions"))
        return encoder.encode_permuted(*arrays, seen, batch.get("positions"), dropout_keys, memory)

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the cross-entropy and the accuracy of the query states."""
        import jax.numpy as jnp

        places = jnp.broadcast_to(jnp.arange(weights.shape[1]), weights.shape)  # among the query states
        batch = encoded.batch | {"word_positions": places}
        return loss_of_words(encoded._replace(hidden=encoded.query_states, batch=batch), weights)[0]

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the output layer and of the query stream."""
        family = families.family_of(config)
        assert isinstance(family, TwoStreamAttention)  # see `validate`
        return super().flops(config, row) + family.query_flops(config, row.tokens, row.predictions)

    def validate(self, config: "ConfigDict") -> None:
        """Checks that the family has two-stream attention, and that nothing is masked."""
        super().validate(config)
        family = config.model.family
        remedy = "has no two-stream attention, which permuted words need; set xlnet"
        require(isinstance(families.FAMILIES.get(family), TwoStreamAttention), "model.family", family, remedy)
        validate_not_masked(self.metrics.title, config)


OBJECTIVE = PermutedWords()
