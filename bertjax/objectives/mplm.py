"""Masked and permuted language modelling with position compensation (MPNet; Song et al. 2020, sections 2.2, 2.3).

The tokens of a text are permuted, and the last 15 % of the permutation are predicted. A query state predicts a token
from the tokens before it in the permutation, as in XLNet. It also attends to masks with the positions of the token and
of all later tokens, as in BERT. Every prediction therefore sees all positions of the text.

From the paper: the share of predicted tokens, both streams and their masks, the positions of the masks, and whole words
(`data.do_whole_word_mask`). As in the code of the paper, the masks are [MASK] in 80 %, a random token in 10 % and the
predicted token in 10 %, and both streams have the same masks. `data.masked_lm_prob` and `data.masked_lm_split` set the
shares. As in the other objectives of bertjax, [CLS] and [SEP] are not predicted. In the code of the paper, they can be.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig
from bertjax.config.stages import Stage
from bertjax.data.batch import BatchSpec, RowSize, per_token
from bertjax.models import families
from bertjax.models.family import PositionCompensation
from bertjax.objectives.mlm import MaskedLM
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
class MaskedPermutationLM(MaskedLM, QueryStream):
    """Predicts the last tokens of a random permutation. Masks have the positions of the tokens that are not seen."""

    metrics = words.WordMetrics("masked and permuted words")

    def batch_spec(self, config: "ConfigDict", stage: Stage) -> BatchSpec:
        """Returns the arrays of the predictions and of `PermutedMasking`."""
        return super().batch_spec(config, stage) | {"ranks": per_token(np.int32), "masked_ids": per_token(np.int32)}

    def transform(self, config: "ConfigDict", stage: Stage, tokenizer: "Tokenizer | None") -> "BatchTransform":
        """Returns the transform that masks tokens and draws the order of their predictions."""
        from bertjax.data.loading.masking import PermutedMasking

        masking: Any = super().transform(config, stage, tokenizer)
        return PermutedMasking(masking)

    def encode(
        self,
        encoder: "nn.Module",
        batch: dict,
        dropout_keys: "jax.Array | None",
        memory: "RecurrentMemory | None" = None,
    ) -> "tuple[jax.Array, jax.Array, RecurrentMemory | None]":
        """Returns the hidden states of both streams, see `QueryStream.encode`."""
        import jax.numpy as jnp

        from bertjax.nn.encoder_model import MaskedPredictions

        places = batch["word_positions"]
        masked_ids, ranks = (jnp.take_along_axis(batch[name], places, axis=1) for name in ("masked_ids", "ranks"))
        ranks = jnp.where(batch["word_weights"] > 0, ranks, 0)
        predictions = MaskedPredictions(places, masked_ids, ranks, batch["ranks"])
        arrays = (batch[name] for name in ("input_ids", "segments", "token_types"))
        return *encoder.encode_compensated(*arrays, predictions, batch.get("positions"), dropout_keys), None

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the cross-entropy and the accuracy of the query stream."""
        return words.query_loss(encoded, weights)

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the head, of the masks and of the query stream."""
        family = families.family_of(config)
        assert isinstance(family, PositionCompensation)  # see `validate`
        layers = family.compensated_flops(config, row.tokens, row.predictions)
        return super().flops(config, row) + layers - family.forward_flops(config, row.tokens)

    def validate(self, config: "ConfigDict") -> None:
        """Checks that the encoder accepts masks with the positions of tokens, and that masking is dynamic."""
        super().validate(config)
        family, masking = config.model.family, config.data.masking
        remedy = "does not support masks with the positions of tokens, which mplm needs; set mpnet"
        require(isinstance(families.FAMILIES.get(family), PositionCompensation), "model.family", family, remedy)
        require(masking == "dynamic", "data.masking", masking, "mplm masks tokens when records are read; set dynamic")


OBJECTIVE = MaskedPermutationLM()
