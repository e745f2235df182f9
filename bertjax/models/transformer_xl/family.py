"""Transformer-XL (Dai et al. 2019): left-to-right layers whose attention knows distances only, and reads a memory, the
states of the tokens before."""

import dataclasses
from typing import ClassVar

import numpy as np

from bertjax.config.model_config import ModelConfig, field, size
from bertjax.models.families import Family, layers_by_name


@dataclasses.dataclass(frozen=True)
class TransformerXLConfig(ModelConfig):
    """The architecture of a Transformer-XL, by default the paper's base model for WikiText-103. Fields are named as
    BERT's, if it has them."""

    vocab_size: int = size(267735)
    hidden_size: int = size(410)
    num_hidden_layers: int = size(16, most=1000)
    num_attention_heads: int = size(10)
    intermediate_size: int = size(2100)
    hidden_act: str = field("relu", "behaviour", choices=("relu", "gelu", "gelu_new"))
    hidden_dropout_prob: float = field(0.1, least=0, below=1)
    attention_probs_dropout_prob: float = field(0.0, least=0, below=1)
    # The longest sequence that is read at once; no param depends on it.
    max_position_embeddings: int = field(8192, "behaviour", least=1, most=2**31 - 1)
    # States of each layer that are kept for the tokens that follow, where texts are longer than what is read at once.
    memory_length: int = field(150, "behaviour", least=1, most=2**31 - 1)
    # Tokens that are farther away count as so far; 0: no limit.
    clamp_length: int = field(0, "behaviour", least=0, most=2**31 - 1)
    untie_biases: bool = field(False, "form")  # each layer has biases u and v of its own
    tie_word_embeddings: bool = field(True, "form")
    initializer_range: float = field(0.02, above=0, below=1)
    layer_norm_eps: float = field(1e-5, "behaviour", above=0, below=1)
    family: str = field("transformer_xl", "form")

    output: ClassVar[str] = "bias"
    type_vocab_size: ClassVar[int] = 0


def _model(config, compute):
    from bertjax.models.transformer_xl.model import TransformerXLModel

    return TransformerXLModel(config, compute)


def _layer_flops(config: TransformerXLConfig, length: int) -> int:
    hidden = config.hidden_size
    # Query, key, value, output; two feed-forward matrices. The projection of distances is the same for all rows.
    per_token = 4 * hidden * hidden + 2 * hidden * config.intermediate_size
    attention = 3 * length * length * hidden  # scores of keys and of distances, and weighted values
    return 2 * config.num_hidden_layers * (length * per_token + attention)


def _shown(params: dict) -> dict | None:
    encoder = params["bert"]["encoder"]
    layers = encoder.get("layers", {})
    if "position" not in layers.get("attention", {}):
        return None
    rows, hidden = params["bert"]["embeddings"]["word"]["embedding"].shape
    count, _, inner = layers["intermediate"]["kernel"].shape
    found = {
        "vocab_size": range(rows, rows - 128, -1),
        "hidden_size": (hidden,),
        "num_hidden_layers": (count,),
        "num_attention_heads": (layers["attention"]["query"]["kernel"].shape[-2],),
        "intermediate_size": (inner,),
        "untie_biases": ("biases" in layers,),
    }
    return found | ({"tie_word_embeddings": ("decoder" not in params["masked_lm"],)} if "masked_lm" in params else {})


def _layer_numbers(config: TransformerXLConfig, path: tuple[str, ...]) -> np.ndarray | None:
    return np.array(0) if path[:2] == ("encoder", "biases") else layers_by_name(config, path)  # the first layer's, too


def _attention(config: TransformerXLConfig, params: dict, ids, segments, token_types):
    del token_types
    from bertjax.models.transformer_xl.model import attention_probabilities

    return attention_probabilities(config, params, ids, segments)


def _new_cache(config: TransformerXLConfig, batch: int, longest: int, dtype):
    from bertjax.models.bert.model import new_cache

    return new_cache(config, batch, longest, dtype)


def _new_memory(config: TransformerXLConfig, rows: int, dtype):
    from bertjax.nn.ops.recurrent_memory import new_memory

    return new_memory(rows, config.num_hidden_layers, config.memory_length, config.hidden_size, dtype)


def _memory_flops(config: TransformerXLConfig, length: int) -> int:
    hidden, memory = config.hidden_size, config.memory_length
    # Keys and values; scores of keys and of distances, and weighted values.
    return 2 * config.num_hidden_layers * (2 * memory * hidden * hidden + 3 * length * memory * hidden)


FAMILY = Family(
    model=_model,
    words=lambda config: "next",
    layer_flops=_layer_flops,
    shown=_shown,
    attention=_attention,
    new_cache=_new_cache,
    new_memory=_new_memory,
    memory_flops=_memory_flops,
    layer_numbers=_layer_numbers,
    packs=True,
    has_kernels=False,
    config=TransformerXLConfig,
)
