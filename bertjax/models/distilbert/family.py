"""DistilBERT (Sanh et al. 2019): BERT without token types.

Only sequence classifiers have a pooler, which is a dense layer with ReLU.
"""

from typing import TYPE_CHECKING

from bertjax.config.model_config import Compute
from bertjax.models.bert.family import BertLayersFamily
from bertjax.models.distilbert.config import DistilBertConfig
from bertjax.models.family import HuggingFaceFamily

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel


class DistilBertFamily(BertLayersFamily, HuggingFaceFamily):
    """DistilBERT."""

    config_class = DistilBertConfig
    model_types = ("distilbert",)

    def build(self, config: DistilBertConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, a `DistilBertModel`."""
        from bertjax.models.distilbert.model import DistilBertModel

        return DistilBertModel(config, compute)


FAMILY = DistilBertFamily()
