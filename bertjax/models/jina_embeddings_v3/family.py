"""Jina Embeddings v3 (Sturua et al. 2024): XLM-R with rotary positions, and an adapter for each task."""

from typing import TYPE_CHECKING

from bertjax.models.jina_embeddings_v3.config import JinaEmbeddingsV3Config
from bertjax.models.rotary_bert.base_family import RotaryBertFamily

if TYPE_CHECKING:
    from bertjax.nn.architecture import FeedForward


class JinaEmbeddingsV3Family(RotaryBertFamily):
    """Jina Embeddings v3."""

    config_class = JinaEmbeddingsV3Config
    model_types = ("jina_embeddings_v3",)
    head_activation = "gelu"
    drops_pooler_input = True  # as in the JinaEmbeddingsV3ClassificationHead of transformers

    def feed_forward(self, config: JinaEmbeddingsV3Config) -> "FeedForward":
        """Returns the network of BERT."""
        from bertjax.nn.architecture import FeedForward

        return FeedForward(config.intermediate_size, config.hidden_act)


FAMILY = JinaEmbeddingsV3Family()
