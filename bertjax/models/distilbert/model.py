"""The modules of DistilBERT."""

import flax.linen as nn

from bertjax.models.bert.model import BertModel
from bertjax.nn.heads import Pooler


class DistilBertModel(BertModel):
    """BERT, pooled with ReLU (`pre_classifier` of transformers)."""

    def make_pooler(self):
        return Pooler(self.config, self.compute, nn.relu)
