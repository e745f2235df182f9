"""ALBERT (Lan et al. 2019): BERT with narrow word embeddings, and with layers that share params."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ml_collections
import numpy as np

from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, Compute
from bertjax.models.albert.config import AlbertConfig
from bertjax.models.bert.family import BertLayersFamily
from bertjax.models.family import HuggingFaceFamily, ProjectsEmbeddings, projection_flops

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel


class AlbertFamily(BertLayersFamily, ProjectsEmbeddings, HuggingFaceFamily):
    """ALBERT, versions 1 and 2."""

    config_class = AlbertConfig
    model_types = ("albert",)

    def build(self, config: AlbertConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, an `AlbertModel`."""
        from bertjax.models.albert.model import AlbertModel

        return AlbertModel(config, compute)

    def forward_flops(self, config: BertConfig, length: int) -> int:
        """Returns the FLOPs of all layers for one row, also of layers that share params."""
        return projection_flops(config, length) + super().forward_flops(config, length)

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply. The number of layers is not among them."""
        fields = super().infer_config(params)
        if fields is None or "projection" not in params["bert"]["embeddings"]:
            return None
        groups, size = fields["num_hidden_layers"], params["bert"]["embeddings"]["word"]["embedding"].shape[1:]
        named = {name: values for name, values in fields.items() if name != "num_hidden_layers"}
        return named | {"num_hidden_groups": groups, "embedding_size": size}

    def layer_ids(self, config: AlbertConfig, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layer numbers of a param. The number of a group is the number of its last layer.

        The params of one group therefore train at the learning rate of the last layer.
        """
        if "layers" in path:
            return config.layers_per_group * (1 + np.arange(config.num_hidden_groups))
        return super().layer_ids(config, path)

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
