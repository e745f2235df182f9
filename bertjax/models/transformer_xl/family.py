"""Transformer-XL (Dai et al. 2019): left-to-right layers whose attention knows distances only, and reads a memory, the
states of the tokens before."""

import numpy as np

from bertjax.models.family import Family, layers_by_name
from bertjax.models.transformer_xl.config import TransformerXLConfig


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
