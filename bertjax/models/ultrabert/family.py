"""UltraBERT: the layers of EuroBERT, of which some have sliding-window attention.

The head for words has two dense layers. A classifier reads hidden states without a pooler.
"""

from typing import TYPE_CHECKING

import ml_collections

from bertjax.config.limits import require
from bertjax.models import rope
from bertjax.models.eurobert import family as eurobert
from bertjax.models.family import HuggingFaceFamily
from bertjax.models.transformer_family import TransformerFamily
from bertjax.models.ultrabert.config import UltraBertConfig

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture

TYPES = ("full", "sliding")


class UltraBertFamily(TransformerFamily, HuggingFaceFamily):
    """UltraBERT."""

    config_class = UltraBertConfig
    model_types = ("ultrabert",)

    def architecture(self, config: UltraBertConfig) -> "Architecture":
        """Returns the choices of UltraBERT."""
        from bertjax.nn import architecture as choose

        feed_forward = choose.FeedForward(config.intermediate_size, "silu", gated=True, bias=False, output_bias=False)
        norm = choose.RMSNorm(config.rms_norm_eps)

        def layer(kind: str) -> choose.Layer:
            theta, scaling = (getattr(config, f"{kind}_rope_{name}") for name in ("theta", "scaling"))
            attention = choose.Attention(
                config.num_attention_heads,
                config.head_dim,
                config.num_key_value_heads,
                bias=False,
                output_bias=False,
                rotary=rope.rotary_of(theta, scaling),
                window=config.sliding_window if kind == "sliding" else None,
            )
            return choose.Layer(attention, feed_forward, norm, choose.PreNorm(), shares_keys=True)

        layers = {kind: layer(kind) for kind in TYPES}
        mode = choose.PoolingMode.MEAN if config.classifier_pooling == "mean" else choose.PoolingMode.FIRST
        transform = choose.TwoLayerTransform(config.prediction_head_size, "gelu_new")
        return choose.Architecture(
            choose.Embeddings(),
            choose.Layers.of([layers[kind] for kind in config.types], norm),
            pooling=choose.Pooling(None, mode),
            word_head=choose.WordHead(transform, bias=False, tied=config.tie_word_embeddings),
        )

    def validate(self, config: ml_collections.ConfigDict) -> None:
        """Checks the layer types, the heads, and the scalings of rotary positions."""
        model = config.model
        for kind in TYPES:
            scaling, theta = model[f"{kind}_rope_scaling"], model[f"{kind}_rope_theta"]
            rope.validate_scaling(scaling, f"model.{kind}_rope_scaling", theta)
        is_known = all(kind in TYPES for kind in model.layer_types.split(","))
        remedy = "must be the types full and sliding, separated by commas: 'sliding,sliding,full'"
        require(is_known, "model.layer_types", model.layer_types, remedy)
        eurobert.validate_heads(config)


FAMILY = UltraBertFamily()
