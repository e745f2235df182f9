"""XLNet (Yang et al. 2019): relative positions, segments that are the same or another, and a second stream of states
that predicts words in any order. [CLS] comes last."""

from bertjax.models.family import Family
from bertjax.models.xlnet.config import XlnetConfig
from bertjax.text.tokenizer import XLNET


def _model(config, compute):
    from bertjax.models.xlnet.model import XlnetModel

    return XlnetModel(config, compute)


def _layer_flops(config: XlnetConfig, length: int) -> int:
    hidden = config.hidden_size
    keys_and_values = 2 * 2 * length * hidden * hidden
    return config.num_hidden_layers * keys_and_values + _query_flops(config, length, length)


def _query_flops(config: XlnetConfig, length: int, queries: int) -> int:
    """Those of queries that read a row, whose keys and values are there.

    The positions' projection is left out: it is the same for all rows of a batch.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    per_token = 2 * hidden * hidden + 2 * hidden * inner  # query, output; two feed-forward matrices
    scores = (length + 2 * length + length) * hidden  # keys, distances to either side; weighted values
    return 2 * config.num_hidden_layers * queries * (per_token + scores)


def _shown(params: dict) -> dict | None:
    kernels = params["bert"]["encoder"].get("layers", {})
    if "segment_bias" not in kernels:
        return None
    layers, hidden, heads, _ = kernels["attention"]["query"]["kernel"].shape
    rows = len(params["bert"]["embeddings"]["word"]["embedding"])
    return {
        "vocab_size": range(rows, rows - 128, -1),
        "hidden_size": (hidden,),
        "num_hidden_layers": (layers,),
        "num_attention_heads": (heads,),
        "intermediate_size": (kernels["intermediate"]["kernel"].shape[-1],),
    }


def _attention(config: XlnetConfig, params: dict, ids, segments, token_types):
    from bertjax.models.xlnet.model import attention_probabilities

    return attention_probabilities(config, params, ids, segments, token_types)


def _new_memory(config: XlnetConfig, rows: int, dtype):
    from bertjax.nn.ops.recurrent_memory import new_memory

    return new_memory(rows, config.num_hidden_layers, config.memory_length, config.hidden_size, dtype)


def _memory_flops(config: XlnetConfig, length: int) -> int:
    """Those of keys and values in the memory, and of the tokens that read them; not of the states that predict."""
    hidden, memory = config.hidden_size, config.memory_length
    return 2 * config.num_hidden_layers * (2 * memory * hidden * hidden + 3 * length * memory * hidden)


FAMILY = Family(
    model=_model,
    words=lambda config: "permuted",
    layer_flops=_layer_flops,
    query_flops=_query_flops,
    shown=_shown,
    attention=_attention,
    new_memory=_new_memory,
    memory_flops=_memory_flops,
    model_types=("xlnet",),
    huggingface="bertjax.models.xlnet.huggingface",
    special_pieces=XLNET,
    packs=True,
    has_kernels=False,
    config=XlnetConfig,
)
