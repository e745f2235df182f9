"""The modules of ELECTRA."""

import flax.linen as nn

from bertjax.models.roberta.model import RobertaModel
from bertjax.nn.encoder import ACTIVATIONS
from bertjax.nn.heads import Pooler


class ElectraModel(RobertaModel):
    """RoBERTa with a GELU in the pooler, as in the ElectraClassificationHead of transformers."""

    def make_pooler(self) -> nn.Module:
        """Returns the pooler."""
        return Pooler(self.config, self.compute, ACTIVATIONS["gelu"])
