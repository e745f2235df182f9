"""ModernBERT (Warner et al. 2024): rotary positions, pre-norm layers, and gated feed-forward networks.

Most layers have no biases. By default, two of three layers have sliding-window attention.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ml_collections
import numpy as np

from bertjax.config.limits import require
from bertjax.config.model_config import Compute
from bertjax.models.family import (
    ExposesAttention,
    HuggingFaceFamily,
    ImportsParams,
    ModelFamily,
    ProjectsEmbeddings,
    possible_vocab_sizes,
    projection_flops,
)
from bertjax.models.modernbert.config import ModernBertConfig, ProjectedModernBertConfig

if TYPE_CHECKING:
    from bertjax.nn.encoder_model import EncoderModel


class ModernBertFamily(ModelFamily, ExposesAttention, ProjectsEmbeddings, ImportsParams, HuggingFaceFamily):
    """ModernBERT."""

    config_class = ModernBertConfig
    supports_packing = True
    model_types = ("modernbert",)

    def build(self, config: ModernBertConfig, compute: Compute) -> "EncoderModel":
        """Returns the encoder, a `ModernBertModel`."""
        from bertjax.models.modernbert.model import ModernBertModel

        return ModernBertModel(config, compute)

    def forward_flops(self, config: ModernBertConfig, length: int) -> int:
        """Returns the FLOPs of the layers for one row, see `ModelFamily.forward_flops`."""
        hidden, inner = config.hidden_size, config.intermediate_size
        per_token = 4 * hidden * hidden + (3 if config.glu else 2) * hidden * inner
        visible_keys = [
            length if config.is_global(layer) else min(length, 2 * config.window + 1)
            for layer in range(config.num_hidden_layers)
        ]
        # Projections and feed-forward layers; scores and weighted values.
        layers = 2 * sum(length * per_token + 2 * length * keys * hidden for keys in visible_keys)
        return projection_flops(config, length) + layers

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`."""
        encoder = params["bert"]["encoder"]
        if "first" not in encoder:
            return None
        first, groups, rest = encoder["first"], encoder.get("groups", {}), encoder.get("rest", {})
        in_groups = sum(layer["attention"]["output"]["kernel"].shape[0] for layer in groups.values())
        input_shape = first["input"]["kernel"].shape
        return {
            "vocab_size": possible_vocab_sizes(params),
            "hidden_size": params["bert"]["embeddings"]["word"]["embedding"].shape[1:],
            "num_hidden_layers": (1 + in_groups + len(rest),),
            "num_attention_heads": (first["attention"]["query_key_value"]["kernel"].shape[-2],),
            "intermediate_size": (input_shape[-1],),
            "glu": (len(input_shape) == 3,),
            "bias": ("bias" in first["input"],),
        }

    def layer_ids(self, config: ModernBertConfig, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layer numbers of a param, see `ModelFamily.layer_ids` and `ModernBertEncoder`."""
        if path[0] != "encoder":
            return super().layer_ids(config, path)
        period = config.global_attn_every_n_layers
        groups = (config.num_hidden_layers - 1) // period
        if path[1] == "first":
            return np.array(1)
        if path[1] in ("groups", "rest"):
            in_group = 2 + int(path[2].removeprefix("layer_"))
            return in_group + (period * np.arange(groups) if path[1] == "groups" else np.array(period * groups))
        return None

    def validate(self, config: ml_collections.ConfigDict) -> None:
        """Checks that the attention window and the head size are even."""
        model = config.model
        require(model.local_attention % 2 == 0, "model.local_attention", model.local_attention, "must be even")
        head = model.hidden_size // model.num_attention_heads
        remedy = f"must give an even head size for rotary positions, but hidden_size / num_attention_heads = {head}"
        require(head % 2 == 0, "model.hidden_size", model.hidden_size, remedy)

    def with_embedding_size(self, config: ModernBertConfig, size: int) -> ModernBertConfig:
        """Returns a `ProjectedModernBertConfig`, or the same config if it already has this embedding size."""
        fields = vars(config) | {"embedding_size": size}
        return config if size == config.embedding_size else ProjectedModernBertConfig(**fields)

    def import_params(self, params: dict) -> dict:
        """Returns params whose pooler is initialized from the dense layer and the norm of the masked-LM head."""
        if "masked_lm" not in params or "pooler" in params["bert"]:
            return params
        head = {name: params["masked_lm"][name] for name in ("dense", "norm")}
        return params | {"bert": params["bert"] | {"pooler": head}}


FAMILY = ModernBertFamily()
