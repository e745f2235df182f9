"""ELECTRA (Clark et al. 2020): BERT with an embedding size that can differ from the hidden size.

Only sequence classifiers have a pooler, which is a dense layer with GELU. A discriminator has the head
`replaced_tokens`.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertjax.config.model_config import BertConfig, Compute
from bertjax.models.bert.family import BertLayersFamily
from bertjax.models.electra.config import ElectraConfig
from bertjax.models.family import HuggingFaceFamily, ProjectsEmbeddings, projection_flops

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel


class ElectraFamily(BertLayersFamily, ProjectsEmbeddings, HuggingFaceFamily):
    """Generators and discriminators of ELECTRA."""

    config_class = ElectraConfig
    model_types = ("electra",)

    def build(self, config: ElectraConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, an `ElectraModel`."""
        from bertjax.models.electra.model import ElectraModel

        return ElectraModel(config, compute)

    def forward_flops(self, config: BertConfig, length: int) -> int:
        """Returns the FLOPs of the layers for one row, see `ModelFamily.forward_flops`."""
        return projection_flops(config, length) + super().forward_flops(config, length)

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        fields = super().infer_config(params)
        size = params["bert"]["embeddings"]["word"]["embedding"].shape[1:]
        return None if fields is None else fields | {"embedding_size": size}

    def with_embedding_size(self, config: ElectraConfig, size: int) -> ElectraConfig:
        """Returns the config with another embedding size."""
        return dataclasses.replace(config, embedding_size=size)


FAMILY = ElectraFamily()
