"""Permutation language modelling with two-stream attention (XLNet; Yang et al. 2019, sections 2.2, 2.3).

The last tokens of a random factorization order are predicted. A query state predicts a token from the position of the
token and from the tokens before it in the order. It does not attend to the predicted token. One forward pass predicts
all tokens.
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
from bertjax.objectives.parts import words

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from ml_collections import ConfigDict

    from bertjax.data.loading.transforms import BatchTransform
    from bertjax.nn.ops.recurrent_memory import RecurrentMemory
    from bertjax.objectives.encoded_batch import EncodedBatch
    from bertjax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class PermutationLM(words.WordObjective, QueryStream):
    """Predicts the last tokens of a random factorization order.

    Attributes:
      k: 1 of `k` tokens is predicted (K in section 2.3).
      max_span_words: the maximum length of a predicted span, in words; 0: spans are single tokens.
    """

    k: int = field(6, least=1)
    max_span_words: int = field(5, least=0, most=100)

    lm_type = "permuted"
    fills_masks = True
    continues = True
    required_values = words.NO_MASKS
    metrics = words.WordMetrics("permuted words")

    def predictions_per_sequence(self, config: "ConfigDict", stage: Stage) -> int:
        """Returns `max_predictions_per_seq` of the stage."""
        return stage.max_predictions_per_seq

    def predictions_per_row(self, config: "ConfigDict", stage: Stage, sequences: int) -> int:
        """Returns the maximum if 1 of `k` tokens of each sequence is predicted."""
        return words.max_predictions_of_row(1 / self.k, stage, sequences)

    def batch_spec(self, config: "ConfigDict", stage: Stage) -> BatchSpec:
        """Returns the arrays of the predictions, and `ranks`, the index of each token in the factorization order."""
        return super().batch_spec(config, stage) | {"ranks": per_token(np.int32)}

    def transform(self, config: "ConfigDict", stage: Stage, tokenizer: "Tokenizer | None") -> "BatchTransform":
        """Returns the transform that samples a factorization order."""
        from bertjax.data.loading.permutation import RandomOrder

        if tokenizer is None:
            raise ValueError("tokenizer is None: permutation language modelling needs the tokenizer of the records")
        ids = tokenizer.cls_id, tokenizer.sep_id
        return RandomOrder(self.k, self.max_span_words, stage.max_predictions_per_seq, *ids, tokenizer.continues_word)

    def encode(
        self,
        encoder: "nn.Module",
        batch: dict,
        dropout_keys: "jax.Array | None",
        memory: "RecurrentMemory | None" = None,
    ) -> "tuple[jax.Array, jax.Array, RecurrentMemory | None]":
        """Returns the hidden states of both streams, see `QueryStream.encode`.

        Tokens that are not predicted have rank 0, and attend to each other. A predicted token attends to tokens of rank
        0 and of lower ranks.
        """
        ranks = batch["ranks"]
        visible = (ranks[:, None] < ranks[:, :, None]) | (ranks == 0)[:, None]  # [rows, queries, keys]
        arrays = (batch[name] for name in ("input_ids", "segments", "token_types", "word_positions"))
        return encoder.encode_permuted(*arrays, visible, batch.get("positions"), dropout_keys, memory)

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the cross-entropy and the accuracy of the query stream."""
        return words.query_loss(encoded, weights)

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the head and of the query stream."""
        family = families.family_of(config)
        assert isinstance(family, TwoStreamAttention)  # see `validate`
        return super().flops(config, row) + family.query_flops(config, row.tokens, row.predictions)

    def validate(self, config: "ConfigDict") -> None:
        """Checks that the family has two-stream attention, and that the data has no masks."""
        super().validate(config)
        family = config.model.family
        remedy = "has no two-stream attention, which permutation language modelling needs; set xlnet"
        require(isinstance(families.FAMILIES.get(family), TwoStreamAttention), "model.family", family, remedy)


OBJECTIVE = PermutationLM()
