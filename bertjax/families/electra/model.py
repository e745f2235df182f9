"""The modules of ELECTRA."""

from bertjax.families.roberta.model import RobertaModel
from bertjax.model.encoder import ACTIVATIONS
from bertjax.model.heads import Pooler


class ElectraModel(RobertaModel):
    """BERT, pooled with GELU, and with RoBERTa's dropout before that (transformers' ElectraClassificationHead)."""

    def make_pooler(self):
        return Pooler(self.config, self.compute, ACTIVATIONS["gelu"])
