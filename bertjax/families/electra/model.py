"""The modules of ELECTRA."""

from bertjax.families.bert.model import BertModel
from bertjax.model.encoder import ACTIVATIONS
from bertjax.model.heads import Pooler


class ElectraModel(BertModel):
    """BERT, pooled with GELU."""

    def make_pooler(self):
        return Pooler(self.config, self.compute, ACTIVATIONS["gelu"])
