"""Transformer-XL (Dai et al. 2019): a causal model with relative positions and segment recurrence.

The recurrent memory contains the hidden states of earlier tokens.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertjax.config.model_config import Compute
from bertjax.models.family import Decodes, ExposesAttention, LmType, ModelFamily, Recurrent, possible_vocab_sizes
from bertjax.models.transformer_xl.config import TransformerXLConfig

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel
    from bertjax.nn.heads import WordHead


class TransformerXLFamily(ModelFamily, Recurrent, Decodes, ExposesAttention):
    """Transformer-XL."""

    config_class = TransformerXLConfig
    supports_packing = True
    has_kernels = False

    def build(self, config: TransformerXLConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, a `TransformerXLModel`."""
        from bertjax.models.transformer_xl.model import TransformerXLModel

        return TransformerXLModel(config, compute)

    def lm_type(self, config: TransformerXLConfig) -> LmType:
        """Returns the task of language modelling, see `ModelFamily.lm_type`."""
        return "causal"

    def word_head(self, config: TransformerXLConfig) -> "WordHead":
        """Returns the decoder with a bias, without a transform."""
        from bertjax.nn.heads import WordHead

        return WordHead(None, tied=config.tie_word_embeddings)

    def forward_flops(self, config: TransformerXLConfig, length: int) -> int:
        """Returns the FLOPs of the layers for one row, see `ModelFamily.forward_flops`."""
        hidden = config.hidden_size
        # Query, key, value, output; two feed-forward matrices. The projection of the distance embeddings is not
        # included, because all rows of a batch share it.
        per_token = 4 * hidden * hidden + 2 * hidden * config.intermediate_size
        attention = 3 * length * length * hidden  # content scores, position scores, and weighted values
        return 2 * config.num_hidden_layers * (length * per_token + attention)

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        kernels = params["bert"]["encoder"].get("layers", {})
        if "position" not in kernels.get("attention", {}):
            return None
        layers, hidden, inner = kernels["intermediate"]["kernel"].shape
        fields: dict[str, Sequence] = {
            "vocab_size": possible_vocab_sizes(params),
            "hidden_size": (hidden,),
            "num_hidden_layers": (layers,),
            "num_attention_heads": (kernels["attention"]["query"]["kernel"].shape[-2],),
            "intermediate_size": (inner,),
            "untie_biases": ("biases" in kernels,),
        }
        if "masked_lm" in params:
            fields["tie_word_embeddings"] = ("decoder" not in params["masked_lm"],)
        return fields

    def layer_ids(self, config: TransformerXLConfig, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layer numbers of a param. Biases that all layers share have number 0, like the embeddings."""
        if path[:2] == ("encoder", "biases"):
            return np.array(0)
        return super().layer_ids(config, path)


FAMILY = TransformerXLFamily()
