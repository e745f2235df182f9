"""The modules of DistilBERT."""

import flax.linen as nn

from bertjax.models.bert.model import BertModel
from bertjax.nn.heads import Pooler


class DistilBertModel(BertModel):
    """BERT with a ReLU in the pooler, the `pre_classifier` of transformers."""

    def make_pooler(self) -> nn.Module:
        """Returns the pooler."""
        return Pooler(self.config, self.compute, nn.relu)
