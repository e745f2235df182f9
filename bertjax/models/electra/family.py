"""ELECTRA (Clark et al. 2020): BERT with an embedding size that can differ from the hidden size.

Only sequence classifiers have a pooler, which is a dense layer with GELU. A discriminator has the head
`replaced_tokens`.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from bertjax.models.bert.family import BertLayersFamily
from bertjax.models.electra.config import ElectraConfig
from bertjax.models.family import HuggingFaceFamily, ProjectsEmbeddings

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture


class ElectraFamily(BertLayersFamily, ProjectsEmbeddings, HuggingFaceFamily):
    """Generators and discriminators of ELECTRA."""

    config_class = ElectraConfig
    model_types = ("electra",)

    def architecture(self, config: Any) -> "Architecture":
        """Returns BERT with dropout and a GELU in the pooler, as in the ElectraClassificationHead of transformers."""
        from bertjax.nn.heads import DenseTransform

        bert = super().architecture(config)
        pooling = dataclasses.replace(
            bert.pooling, transform=DenseTransform("gelu"), dropout=config.pooled_dropout_prob
        )
        return dataclasses.replace(bert, pooling=pooling)

    def with_embedding_size(self, config: ElectraConfig, size: int) -> ElectraConfig:
        """Returns the config with another embedding size."""
        return dataclasses.replace(config, embedding_size=size)


FAMILY = ElectraFamily()
