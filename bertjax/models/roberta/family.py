"""RoBERTa (Liu et al. 2019): BERT without token types. The first rows of the position embeddings are unused.

XLM-R and CamemBERT have the same architecture.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from bertjax.models.bert.family import BertLayersFamily
from bertjax.models.family import HuggingFaceFamily
from bertjax.models.roberta.config import RobertaConfig

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture


class RobertaFamily(BertLayersFamily, HuggingFaceFamily):
    """RoBERTa, XLM-R and CamemBERT."""

    config_class = RobertaConfig
    model_types: tuple[str, ...] = ("roberta", "xlm-roberta", "camembert")

    def architecture(self, config: Any) -> "Architecture":
        """Returns BERT with dropout before the pooler, as in the RobertaClassificationHead of transformers."""
        bert = super().architecture(config)
        return dataclasses.replace(bert, pooling=dataclasses.replace(bert.pooling, dropout=config.pooled_dropout_prob))


FAMILY = RobertaFamily()
