"""NeoBERT (Le Breton et al. 2025): pre-norm layers with RMSNorm, rotary positions and SwiGLU, without biases."""

from typing import TYPE_CHECKING

import ml_collections

from bertjax.config.limits import require
from bertjax.models.family import HuggingFaceFamily
from bertjax.models.neobert.config import NeoBertConfig
from bertjax.models.transformer_family import TransformerFamily

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture

ROPE_THETA = 10_000.0  # the default in the published code; no config sets another base


class NeoBertFamily(TransformerFamily, HuggingFaceFamily):
    """NeoBERT."""

    config_class = NeoBertConfig
    model_types = ("neobert",)

    def architecture(self, config: NeoBertConfig) -> "Architecture":
        """Returns the choices of NeoBERT."""
        from bertjax.nn import architecture as choose

        heads, rotary = config.num_attention_heads, choose.Rotary(ROPE_THETA)
        attention = choose.Attention(heads, config.head_size, bias=False, output_bias=False, rotary=rotary)
        feed_forward = choose.FeedForward(config.intermediate_size, "silu", gated=True, bias=False, output_bias=False)
        norm = choose.RMSNorm(config.norm_eps)
        layer = choose.Layer(attention, feed_forward, norm, choose.PreNorm(), shares_keys=True)
        return choose.Architecture(
            choose.Embeddings(),
            choose.Layers(config.num_hidden_layers, (layer,), norm=norm),
            pooling=choose.Pooling(choose.DenseTransform("tanh"), dropout=config.classifier_dropout),
            word_head=choose.WordHead(None, tied=False),
        )

    def validate(self, config: ml_collections.ConfigDict) -> None:
        """Checks that the head size is even."""
        hidden, head = config.model.hidden_size, config.model.hidden_size // config.model.num_attention_heads
        remedy = f"must give an even head size for rotary positions, but hidden_size / num_attention_heads = {head}"
        require(head % 2 == 0, "model.hidden_size", hidden, remedy)


FAMILY = NeoBertFamily()
