"""ELECTRA (Clark et al. 2020): BERT with embeddings of any size.

Only classifiers of texts have a pooler, a dense layer with GELU. A discriminator has the output layer
`replaced_tokens`.
"""

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from bertjax.config.model_config import Compute
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
        from bertjax.models.electra.model import ElectraModel

        return ElectraModel(config, compute)

    def forward_flops(self, config: ElectraConfig, length: int) -> int:
        return projection_flops(config, length) + super().forward_flops(config, length)

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        fields = super().infer_config(params)
        size = params["bert"]["embeddings"]["word"]["embedding"].shape[1:]
        return None if fields is None else fields | {"embedding_size": size}

    def with_embedding_size(self, config: ElectraConfig, size: int) -> ElectraConfig:
        return dataclasses.replace(config, embedding_size=size)

    @property
    def huggingface(self) -> ModuleType:
        from bertjax.models.electra import huggingface

        return huggingface


FAMILY = ElectraFamily()
