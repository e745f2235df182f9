"""MegatronBERT (Shoeybi et al. 2019): BERT with a LayerNorm before each part, and after the last layer.

There is no LayerNorm after the embeddings.
"""

from bertjax.models.bert.family import BertLayersFamily
from bertjax.models.family import HuggingFaceFamily
from bertjax.models.megatron_bert.config import MegatronBertConfig


class MegatronBertFamily(BertLayersFamily, HuggingFaceFamily):
    """MegatronBERT."""

    config_class = MegatronBertConfig
    model_types = ("megatron-bert",)


FAMILY = MegatronBertFamily()
