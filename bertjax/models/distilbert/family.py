"""DistilBERT (Sanh et al. 2019): BERT without token types.

Only sequence classifiers have a pooler, which is a dense layer with ReLU.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from bertjax.models.bert.family import BertLayersFamily
from bertjax.models.distilbert.config import DistilBertConfig
from bertjax.models.family import HuggingFaceFamily

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture


class DistilBertFamily(BertLayersFamily, HuggingFaceFamily):
    """DistilBERT."""

    config_class = DistilBertConfig
    model_types = ("distilbert",)

    def architecture(self, config: Any) -> "Architecture":
        """Returns BERT with a ReLU in the pooler, the `pre_classifier` of transformers."""
        from bertjax.nn.heads import DenseTransform

        bert = super().architecture(config)
        return dataclasses.replace(bert, pooling=dataclasses.replace(bert.pooling, transform=DenseTransform("relu")))


FAMILY = DistilBertFamily()
