"""ALBERT (Lan et al. 2019): BERT with narrow word embeddings, and with layers that share params."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_collections

from bertjax.config.limits import require
from bertjax.models.albert.config import AlbertConfig
from bertjax.models.bert.family import BertLayersFamily
from bertjax.models.family import HuggingFaceFamily, ProjectsEmbeddings

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture


class AlbertFamily(BertLayersFamily, ProjectsEmbeddings, HuggingFaceFamily):
    """ALBERT, versions 1 and 2."""

    config_class = AlbertConfig
    model_types = ("albert",)

    def architecture(self, config: Any) -> "Architecture":
        """Returns BERT with layers that share params."""
        bert = super().architecture(config)
        return dataclasses.replace(bert, layers=dataclasses.replace(bert.layers, shared=config.layers_per_group))

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply. The number of layers is not among them."""
        fields = super().infer_config(params)
        if fields is None or "projection" not in params["bert"]["embeddings"]:
            return None
        groups = fields.pop("num_hidden_layers")
        return fields | {"num_hidden_groups": groups}

    def with_embedding_size(self, config: AlbertConfig, size: int) -> AlbertConfig:
        """Returns the config with another embedding size."""
        return dataclasses.replace(config, embedding_size=size)

    def validate(self, config: ml_collections.ConfigDict) -> None:
        """Checks the number of groups, and that no group is frozen in part."""
        layers, groups = config.model.num_hidden_layers, config.model.num_hidden_groups
        remedy = f"must divide model.num_hidden_layers = {layers}"
        require(layers % groups == 0, "model.num_hidden_groups", groups, remedy)
        frozen, shared = config.get("freeze_layers", 0), layers // groups
        remedy = f"must be a multiple of {shared}, the number of layers that share their params"
        require(frozen % shared == 0, "freeze_layers", frozen, remedy)


FAMILY = AlbertFamily()
