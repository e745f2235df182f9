"""EuroBERT (Boizard et al. 2025): the layers of Llama with bidirectional attention.

Layers are pre-norm with RMSNorm, and have rotary positions, grouped-query attention, gated feed-forward networks and no
biases.
"""

from typing import TYPE_CHECKING

import ml_collections

from bertjax.config.limits import require
from bertjax.models import rope
from bertjax.models.eurobert.config import EuroBertConfig
from bertjax.models.family import HuggingFaceFamily
from bertjax.models.transformer_family import TransformerFamily

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture


class EuroBertFamily(TransformerFamily, HuggingFaceFamily):
    """EuroBERT."""

    config_class = EuroBertConfig
    model_types = ("eurobert",)

    def architecture(self, config: EuroBertConfig) -> "Architecture":
        """Returns the choices of EuroBERT.

        With the pooling "late", transformers averages the logits of all tokens. The logits of the mean are the same.
        """
        from bertjax.nn import architecture as choose

        attention = choose.Attention(
            config.num_attention_heads,
            config.head_dim,
            config.num_key_value_heads,
            bias=False,
            output_bias=False,
            rotary=rope.rotary_of(config.rope_theta, config.rope_scaling),
        )
        feed_forward = choose.FeedForward(config.intermediate_size, "silu", gated=True, bias=False, output_bias=False)
        norm, mode = choose.RMSNorm(config.rms_norm_eps), choose.PoolingMode
        layer = choose.Layer(attention, feed_forward, norm, choose.PreNorm(), shares_keys=True)
        modes = {"bos": mode.FIRST, "mean": mode.MEAN, "late": mode.EVERY}
        return choose.Architecture(
            choose.Embeddings(),
            choose.Layers(config.num_hidden_layers, (layer,), norm=norm),
            pooling=choose.Pooling(choose.DenseTransform("gelu"), modes[config.classifier_pooling]),
            word_head=choose.WordHead(None, bias=False, tied=config.tie_word_embeddings),
        )

    def validate(self, config: ml_collections.ConfigDict) -> None:
        """Checks the number of key-value heads, the head size, and the scaling of rotary positions."""
        rope.validate_scaling(config.model.rope_scaling, "model.rope_scaling", config.model.rope_theta)
        validate_heads(config)


def validate_heads(config: ml_collections.ConfigDict) -> None:
    """Checks the number of key-value heads and the head size of a run config."""
    heads, keys, size = (config.model[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    require(heads % keys == 0, "model.num_key_value_heads", keys, f"must divide model.num_attention_heads = {heads}")
    require(size % 2 == 0, "model.head_dim", size, "must be even, because rotary positions rotate pairs of elements")


FAMILY = EuroBertFamily()
