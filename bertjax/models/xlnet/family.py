"""XLNet (Yang et al. 2019): relative positions, segments that are the same or another, and a second stream of states
that predicts words in any order. [CLS] comes last."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import ModelConfig, field, size
from bertjax.models.families import Family
from bertjax.text.tokenizer import XLNET


@dataclasses.dataclass(frozen=True)
class XlnetConfig(ModelConfig):
    """The architecture of an XLNet, by default of base. Fields are named as BERT's."""

    vocab_size: int = size(32000)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(12, most=1000)
    num_attention_heads: int = size(12)
    intermediate_size: int = size(3072)
    hidden_act: str = field("gelu", "behaviour", choices=("gelu", "gelu_new", "relu"))
    hidden_dropout_prob: float = field(0.1, least=0, below=1)
    attention_probs_dropout_prob: float = field(0.1, least=0, below=1)
    # The longest sequence; no param depends on it.
    max_position_embeddings: int = field(512, least=1, most=2**31 - 1)
    # States of each layer that are kept for the tokens that follow, where a row goes on (`data.stream`).
    memory_length: int = field(384, least=1, most=2**31 - 1)
    initializer_range: float = field(0.02, above=0, below=1)
    layer_norm_eps: float = field(1e-12, "behaviour", above=0, below=1)
    family: str = field("xlnet", "form")

    output: ClassVar[str] = "bias"
    type_vocab_size: ClassVar[int] = 3  # text A, text B, and the [CLS] at the end; only whether two are the same counts

    @property
    def spans_dropout_prob(self) -> float:
        """What output layers read has dropout: `XlnetModel` drops that of texts, output layers of tokens their own."""
        return self.hidden_dropout_prob


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
