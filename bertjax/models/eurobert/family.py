"""EuroBERT (Boizard et al. 2025): the layers of Llama with bidirectional attention.

Layers are pre-norm with RMSNorm, and have rotary positions, grouped-query attention, gated feed-forward networks and no
biases.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ml_collections

from bertjax.config.limits import require
from bertjax.config.model_config import Compute
from bertjax.models.eurobert.config import EuroBertConfig
from bertjax.models.family import ExposesAttention, HuggingFaceFamily, ModelFamily, possible_vocab_sizes

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel


class EuroBertFamily(ModelFamily, ExposesAttention, HuggingFaceFamily):
    """EuroBERT."""

    config_class = EuroBertConfig
    supports_packing = True
    model_types = ("eurobert",)

    def build(self, config: EuroBertConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, a `EuroBertModel`."""
        from bertjax.models.eurobert.model import EuroBertModel

        return EuroBertModel(config, compute)

    def forward_flops(self, config: EuroBertConfig, length: int) -> int:
        """Returns the FLOPs of the layers for one row, see `ModelFamily.forward_flops`."""
        hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        # Query and output; key and value; three feed-forward matrices.
        per_token = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config.intermediate_size
        attention = 2 * length * length * queries  # scores and weighted values, all heads
        return 2 * config.num_hidden_layers * (length * per_token + attention)

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        kernels = params["bert"]["encoder"].get("layers", {})
        if "key_value" not in kernels.get("attention", {}):
            return None
        layers, hidden, heads, head_dim = kernels["attention"]["query"]["kernel"].shape
        fields: dict[str, Sequence] = {
            "vocab_size": possible_vocab_sizes(params),
            "hidden_size": (hidden,),
            "num_hidden_layers": (layers,),
            "num_attention_heads": (heads,),
            "num_key_value_heads": (kernels["attention"]["key_value"]["kernel"].shape[-2],),
            "head_dim": (head_dim,),
            "intermediate_size": (kernels["input"]["kernel"].shape[-1],),
        }
        return fields | ({"tie_word_embeddings": (False,)} if "masked_lm" in params else {})

    def validate(self, config: ml_collections.ConfigDict) -> None:
        """Checks the number of key-value heads, and the head size."""
        heads, keys, size = (config.model[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        remedy = f"must divide model.num_attention_heads = {heads}"
        require(heads % keys == 0, "model.num_key_value_heads", keys, remedy)
        require(
            size % 2 == 0, "model.head_dim", size, "must be even, because rotary positions rotate pairs of elements"
        )


FAMILY = EuroBertFamily()
