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
from bertjax.models.family import HuggingFaceFamily
from bertjax.models.transformer_family import TransformerFamily, embedding_fields

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture
    from bertjax.nn.encoder_model import EncoderModel


class DebertaV2Family(TransformerFamily, HuggingFaceFamily):
    """DeBERTa-v2, DeBERTa-v3 and mDeBERTa."""

    config_class = DebertaV2Config
    has_kernels = False
    model_types = ("deberta-v2",)

    def architecture(self, config: DebertaV2Config) -> "Architecture":
        """Returns the choices of BERT with disentangled attention. The pooler is the ContextPooler of transformers."""
        from bertjax.models.deberta_v2.attention import DisentangledChoices
        from bertjax.nn import architecture as choose
        from bertjax.nn.heads import word_head_of

        norm, rate = choose.LayerNorm(config.layer_norm_eps), config.hidden_dropout_prob
        feed_forward = choose.FeedForward(config.intermediate_size, config.hidden_act, input_name="intermediate")
        layer = choose.Layer(DisentangledChoices(config), feed_forward, norm, choose.PostNorm(), rate, rate)
        positions = choose.LearnedPositions(config.max_position_embeddings) if config.position_biased_input else None
        return choose.Architecture(
            choose.Embeddings(positions, config.type_vocab_size, norm, dropout=rate),
            choose.Layers(config.num_hidden_layers, (layer,)),
            pooling=choose.Pooling(choose.DenseTransform("gelu"), dropout=config.pooler_dropout),
            word_head=word_head_of(config),
        )

    def build(self, config: DebertaV2Config, compute: Compute) -> "EncoderModel":
        """Returns the encoder, a `DebertaV2Model`."""
        from bertjax.models.deberta_v2.model import DebertaV2Model

        return DebertaV2Model(config, compute, architecture=self.architecture(config))

    def forward_flops(self, config: DebertaV2Config, length: int) -> int:
        """Returns the FLOPs of the layers for one row, with the convolution, see `ModelFamily.forward_flops`."""
        convolution = 2 * length * config.conv_kernel_size * config.hidden_size**2
        return super().forward_flops(config, length) + convolution

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        fields = super().infer_config(params)
        encoder, embeddings = params["bert"]["encoder"], params["bert"]["embeddings"]
        attention = encoder.get("layers", {}).get("attention", {})
        if fields is None or "query_key_value" not in attention:
            return None
        fields |= embedding_fields(params) | {
            "position_biased_input": ("position" in embeddings,),
            "relative_attention": ("distances" in encoder,),
            "conv_kernel_size": (encoder["convolution"]["kernel"].shape[1] if "convolution" in encoder else 0,),
        }
        if "distances" in encoder:
            fields["position_buckets"] = (len(encoder["distances"]["embedding"]) // 2, -1, 0)
            fields["norm_rel_ebd"] = ("layer_norm" if "norm" in encoder["distances"] else "none",)
        if {"distance_key", "distance_query"} & attention.keys():
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
