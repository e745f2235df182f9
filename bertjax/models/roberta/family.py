"""RoBERTa (Liu et al. 2019): BERT without token types. The first rows of the position embeddings are unused.

XLM-R and CamemBERT have the same architecture.
"""

from typing import TYPE_CHECKING

from bertjax.config.model_config import Compute
from bertjax.models.bert.family import BertLayersFamily
from bertjax.models.family import HuggingFaceFamily
from bertjax.models.roberta.config import RobertaConfig

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel


class RobertaFamily(BertLayersFamily, HuggingFaceFamily):
    """RoBERTa, XLM-R and CamemBERT."""

    config_class = RobertaConfig
    model_types: tuple[str, ...] = ("roberta", "xlm-roberta", "camembert")

    def build(self, config: RobertaConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, a `RobertaModel`."""
        from bertjax.models.roberta.model import RobertaModel

        return RobertaModel(config, compute)


FAMILY = RobertaFamily()
