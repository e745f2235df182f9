"""The base class of NomicBERT, GTE and Jina Embeddings v3: BERT's layers with rotary positions."""

import abc
from typing import TYPE_CHECKING, Any

import ml_collections

from bertjax.config.limits import require
from bertjax.models import rope
from bertjax.models.family import HuggingFaceFamily
from bertjax.models.transformer_family import TransformerFamily

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture, FeedForward


class RotaryBertFamily(TransformerFamily, HuggingFaceFamily):
    """A family whose config is a `RotaryBertConfig`: a norm after each part, and a norm of the embeddings.

    Attributes:
      attention_bias: whether the layers of the attention have biases.
      head_activation: the activation of the head for words; "" for the activation of the layers.
      drops_pooler_input: whether there is also dropout before the pooler.
    """

    attention_bias = True
    head_activation = ""
    drops_pooler_input = False

    @abc.abstractmethod
    def feed_forward(self, config: Any) -> "FeedForward":
        """Returns the choices of the feed-forward network.

        Args:
          config: the model config.
        """

    def architecture(self, config: Any) -> "Architecture":
        """Returns the choices of the encoder and of its heads, see `TransformerFamily.architecture`."""
        from bertjax.nn import architecture as choose

        norm, rate = choose.LayerNorm(config.layer_norm_eps), config.hidden_dropout_prob
        attention = choose.Attention(
            config.num_attention_heads,
            config.head_size,
            bias=self.attention_bias,
            output_bias=self.attention_bias,
            dropout=config.attention_probs_dropout_prob,
            rotary=rope.rotary_of(config.rope_theta, config.rope_scaling),
        )
        layer = choose.Layer(attention, self.feed_forward(config), norm, choose.PostNorm(), rate, rate)
        return choose.Architecture(
            choose.Embeddings(token_types=config.type_vocab_size, norm=norm, dropout=rate),
            choose.Layers(config.num_hidden_layers, (layer,)),
            pooling=choose.Pooling(dropout=config.pooled_dropout_prob if self.drops_pooler_input else 0.0),
            word_head=choose.WordHead(choose.DenseTransform(self.head_activation or config.hidden_act, norm)),
        )

    def validate(self, config: ml_collections.ConfigDict) -> None:
        """Checks that the head size is even, and the scaling of rotary positions."""
        model = config.model
        rope.validate_scaling(model.rope_scaling, "model.rope_scaling", model.rope_theta)
        head = model.hidden_size // model.num_attention_heads
        remedy = f"must give an even head size for rotary positions, but hidden_size / num_attention_heads = {head}"
        require(head % 2 == 0, "model.hidden_size", model.hidden_size, remedy)
