"""DeBERTa-v2 and DeBERTa-v3 (He et al. 2021, arXiv 2006.03654 and 2111.09543): BERT with disentangled attention.

Attention scores depend on the contents, and on the distance between two tokens. Absolute positions are optional.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ml_collections
import numpy as np

from bertjax.config.limits import require
from bertjax.config.model_config import Compute
from bertjax.models.deberta_v2.config import DebertaV2Config
from bertjax.models.family import ExposesAttention, HuggingFaceFamily, ModelFamily, possible_vocab_sizes

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel


class DebertaV2Family(ModelFamily, ExposesAttention, HuggingFaceFamily):
    """DeBERTa-v2, DeBERTa-v3 and mDeBERTa."""

    config_class = DebertaV2Config
    supports_packing = True
    has_kernels = False
    model_types = ("deberta-v2",)

    def build(self, config: DebertaV2Config, compute: Compute) -> "EncoderModel":
        """Returns the encoder, a `DebertaV2Model`."""
        from bertjax.models.deberta_v2.model import DebertaV2Model

        return DebertaV2Model(config, compute)

    def forward_flops(self, config: DebertaV2Config, length: int) -> int:
        """Returns the FLOPs of the layers for one row, see `ModelFamily.forward_flops`.

        The projections of the embeddings of distances are not included, because all rows of a batch share them.
        """
        hidden, inner = config.hidden_size, config.intermediate_size
        per_token = 4 * hidden * hidden + 2 * hidden * inner  # query, key, value, output; two feed-forward matrices
        terms = len(config.position_terms) if config.relative_attention else 0
        per_query = 2 * length + terms * (2 * length - 1)  # scores and weighted values; scores of all distances
        convolution = length * config.conv_kernel_size * hidden * hidden
        return 2 * (config.num_hidden_layers * length * (per_token + per_query * hidden) + convolution)

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        encoder, embeddings = params["bert"]["encoder"], params["bert"]["embeddings"]
        kernels = encoder.get("layers", {})
        if "query_key_value" not in kernels.get("attention", {}):
            return None
        layers, hidden, _, heads, _ = kernels["attention"]["query_key_value"]["kernel"].shape
        fields: dict[str, Sequence] = {
            "vocab_size": possible_vocab_sizes(params),
            "hidden_size": (hidden,),
            "num_hidden_layers": (layers,),
            "num_attention_heads": (heads,),
            "intermediate_size": (kernels["intermediate"]["kernel"].shape[-1],),
            "type_vocab_size": (len(embeddings["token_type"]["embedding"]) if "token_type" in embeddings else 0,),
            "position_biased_input": ("position" in embeddings,),
            "relative_attention": ("distances" in encoder,),
            "conv_kernel_size": (encoder["convolution"]["kernel"].shape[1] if "convolution" in encoder else 0,),
        }
        if "position" in embeddings:
            fields["max_position_embeddings"] = (len(embeddings["position"]["embedding"]),)
        if "distances" in encoder:
            fields["position_buckets"] = (len(encoder["distances"]["embedding"]) // 2, -1, 0)
            fields["norm_rel_ebd"] = ("layer_norm" if "norm" in encoder["distances"] else "none",)
        if {"distance_key", "distance_query"} & kernels["attention"].keys():
            fields["share_att_key"] = (False,)
        return fields

    def layer_ids(self, config: DebertaV2Config, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layer numbers of a param: 0 for params outside of the layers, see `ModelFamily.layer_ids`."""
        is_shared = path[:2] in (("encoder", "distances"), ("encoder", "convolution"))
        return np.array(0) if is_shared else super().layer_ids(config, path)

    def validate(self, config: ml_collections.ConfigDict) -> None:
        """Checks the number of buckets, and the width of the convolution."""
        buckets, width = config.model.position_buckets, config.model.conv_kernel_size
        require(buckets != 1, "model.position_buckets", buckets, "must be at least 2, or -1 for no buckets")
        require(width % 2 == 1 or not width, "model.conv_kernel_size", width, "must be odd, or 0 for no convolution")


FAMILY = DebertaV2Family()
