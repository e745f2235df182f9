"""MPNet (Song et al. 2020): BERT without token types, with a relative position bias that all layers share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bertjax.config.model_config import Compute
from bertjax.models.bert.family import EncoderLayersFamily
from bertjax.models.family import HuggingFaceFamily
from bertjax.models.mpnet.config import MPNetConfig

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel


class MPNetFamily(EncoderLayersFamily, HuggingFaceFamily):
    """MPNet."""

    config_class = MPNetConfig
    has_kernels = False
    model_types = ("mpnet",)

    def build(self, config: MPNetConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, an `MPNetModel`."""
        from bertjax.models.mpnet.model import MPNetModel

        return MPNetModel(config, compute)

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        return super().infer_config(params) if "relative_attention_bias" in params["bert"] else None

    def layer_ids(self, config: MPNetConfig, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layer numbers of a param. The bias that all layers share has number 0, like the embeddings."""
        return np.array(0) if path == ("relative_attention_bias",) else super().layer_ids(config, path)


FAMILY = MPNetFamily()
