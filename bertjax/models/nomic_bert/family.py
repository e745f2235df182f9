"""NomicBERT (Nussbaum et al. 2024): BERT with rotary positions, gated feed-forward networks, and few biases."""

from typing import TYPE_CHECKING

from bertjax.models.nomic_bert.config import NomicBertConfig
from bertjax.models.rotary_bert.base_family import RotaryBertFamily

if TYPE_CHECKING:
    from bertjax.nn.architecture import FeedForward


class NomicBertFamily(RotaryBertFamily):
    """NomicBERT, the encoder of nomic-embed-text."""

    config_class = NomicBertConfig
    model_types = ("nomic_bert",)
    attention_bias = False

    def feed_forward(self, config: NomicBertConfig) -> "FeedForward":
        """Returns a gated network without biases, SwiGLU by default."""
        from bertjax.nn.architecture import FeedForward

        return FeedForward(config.intermediate_size, config.hidden_act, gated=True, bias=False, output_bias=False)


FAMILY = NomicBertFamily()
