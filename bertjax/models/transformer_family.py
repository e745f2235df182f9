"""The base class of families whose encoder is a Transformer with the choices of an `Architecture`."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bertjax.config.model_config import Compute
from bertjax.models.family import ExposesAttention, ModelFamily, possible_vocab_sizes

if TYPE_CHECKING:
    from bertjax.nn.architecture import Architecture
    from bertjax.nn.encoder_model import EncoderModel
    from bertjax.nn.heads import WordHead


class TransformerFamily(ExposesAttention, ModelFamily):
    """A family that composes its encoder from the objects in `bertjax.nn.architecture`.

    A family overrides `architecture`. The modules, the FLOPs and the layer numbers follow from the architecture.
    """

    supports_packing = True

    @abc.abstractmethod
    def architecture(self, config: Any) -> "Architecture":
        """Returns the choices of the encoder and of its heads.

        Import the choices here and not at the top of the file, because the registry imports families without JAX.

        Args:
          config: the model config.
        """

    def build(self, config: Any, compute: Compute) -> "EncoderModel":
        """Returns the encoder, a `TransformerModel`."""
        from bertjax.nn.encoder_model import TransformerModel

        return TransformerModel(config, compute, architecture=self.architecture(config))

    def word_head(self, config: Any) -> "WordHead":
        """Returns the choices of the head that predicts words."""
        return self.architecture(config).word_head

    def forward_flops(self, config: Any, length: int) -> int:
        """Returns the FLOPs of the layers for one row, see `ModelFamily.forward_flops`."""
        return self.architecture(config).flops(config.embedding_size, config.hidden_size, length)

    def layer_ids(self, config: Any, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layer numbers of a param, see `ModelFamily.layer_ids`."""
        if path[0] in ("embeddings", "relative_attention_bias"):
            return np.array(0)
        return self.architecture(config).layers.ids(path[1:]) if path[0] == "encoder" else None

    def stack_layers(self, config: Any, layers: Sequence[dict]) -> dict:
        """Returns the params of the encoder's layers, see `ModelFamily.stack_layers`."""
        return self.architecture(config).layers.stack(layers)

    def unstack_layers(self, config: Any, encoder: dict) -> list[dict]:
        """Returns the params of each layer, see `ModelFamily.unstack_layers`."""
        return self.architecture(config).layers.unstack(encoder)

    def infer_config(self, params: dict) -> dict[str, Sequence] | None:
        """Returns the config fields that params imply, see `ModelFamily.infer_config`.

        The names of the params must be the names of the default config. The result has the fields of `config_class`
        that the shapes of word embeddings and layers determine. A family whose architecture depends on the other
        embeddings adds `embedding_fields`.
        """
        encoder, names = params["bert"]["encoder"], {field.name for field in dataclasses.fields(self.config_class)}
        layers = _layers_in(encoder)
        if not layers or not self._has_names(layers[0][0], params):
            return None
        fields = _layer_fields(layers)
        fields["vocab_size"] = possible_vocab_sizes(params)
        fields["embedding_size"] = params["bert"]["embeddings"]["word"]["embedding"].shape[1:]
        if "masked_lm" in params:
            fields["tie_word_embeddings"] = ("decoder" not in params["masked_lm"],)
        if "second_dense" in params.get("masked_lm", {}):
            fields["prediction_head_size"] = params["masked_lm"]["dense"]["kernel"].shape[-1:]
        return {name: values for name, values in fields.items() if name in names}

    def _has_names(self, layer: dict, params: dict) -> bool:
        """Returns whether the params of a layer have the names of the family."""
        from bertjax.nn.architecture import Attention, RelativeBias

        architecture = self.architecture(self.config_class())
        choices = architecture.layers.group[0]
        has_bias = "relative_attention_bias" in params["bert"]
        if (
            choices.feed_forward.input_name not in layer
            or isinstance(architecture.score_bias, RelativeBias) != has_bias
        ):
            return False
        if not isinstance(choices.attention, Attention):
            return True
        name = "query_key_value" if choices.attention.key_value_heads is None else "key_value"
        return name in layer.get("attention", {})


def _layers_in(encoder: dict) -> list[tuple[dict, int]]:
    """Returns pairs of the params of layers, and the number of layers that these params stack; 0: not stacked."""
    if "layers" in encoder:
        kernel = encoder["layers"].get("attention", {}).get("output", {}).get("kernel")
        return [] if kernel is None else [(encoder["layers"], len(kernel))]
    groups = encoder.get("groups", {}).values()
    return [
        *([(encoder["first"], 0)] if "first" in encoder else []),
        *((layer, len(layer["attention"]["output"]["kernel"])) for layer in groups),
        *((layer, 0) for layer in encoder.get("rest", {}).values()),
    ]


def _layer_fields(layers: list[tuple[dict, int]]) -> dict[str, Sequence]:
    """Returns the config fields that the shapes of layers determine; for the arguments see `_layers_in`."""
    layer, stacked = layers[0]
    attention, axes = layer["attention"], 1 if stacked else 0
    input_layer = layer["intermediate" if "intermediate" in layer else "input"]
    input_shape = input_layer["kernel"].shape[axes:]
    heads, size = attention["output"]["kernel"].shape[axes : axes + 2]
    fields: dict[str, Sequence] = {
        "num_hidden_layers": (sum(max(count, 1) for _, count in layers),),
        "hidden_size": input_shape[:1],
        "num_attention_heads": (heads,),
        "head_dim": (size,),
        "intermediate_size": input_shape[-1:],
        "glu": (len(input_shape) == 3,),
        "bias": ("bias" in input_layer,),
    }
    if "key_value" in attention:
        fields["num_key_value_heads"] = (attention["key_value"]["kernel"].shape[-2],)
    return fields


def embedding_fields(params: dict) -> dict[str, Sequence]:
    """Returns the config fields that the embeddings of token types and of positions determine.

    Args:
      params: the params of a model, see `ModelFamily.infer_config`.
    """
    embeddings = params["bert"]["embeddings"]
    fields: dict[str, Sequence] = {
        "type_vocab_size": (len(embeddings["token_type"]["embedding"]) if "token_type" in embeddings else 0,),
    }
    if "position" in embeddings:
        fields["max_position_embeddings"] = (len(embeddings["position"]["embedding"]),)
    return fields
