"""The modules of ELECTRA."""

from bertjax.models.roberta.model import RobertaModel
from bertjax.nn.encoder import ACTIVATIONS
from bertjax.nn.heads import Pooler


class ElectraModel(RobertaModel):
    """BERT, pooled with GELU, and with RoBERTa's dropout before that (transformers' ElectraClassificationHead)."""

    def make_pooler(self):
        return Pooler(self.config, self.compute, ACTIVATIONS["gelu"])
