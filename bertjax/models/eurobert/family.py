"""EuroBERT (Boizard et al. 2025): Llama's layers, but all tokens attend to each other: RMSNorm before each part, rotary
positions, heads that share keys and values, gated feed-forward layers, no biases."""

import dataclasses
from typing import ClassVar

from bertjax.config.limits import require
from bertjax.config.model_config import ModelConfig, field, size
from bertjax.models.families import Family


@dataclasses.dataclass(frozen=True)
class EuroBertConfig(ModelConfig):
    """The architecture of a EuroBERT, by default of 210m. Fields are named as in Hugging Face's config.json.

    There is no dropout, as in transformers.
    """

    vocab_size: int = size(128256)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(12, most=1000)
    num_attention_heads: int = size(12)
    num_key_value_heads: int = size(12)  # a divisor of num_attention_heads, of which as many share a key and a value
    head_dim: int = size(64)
    intermediate_size: int = size(3072)
    # The longest sequence; no param depends on it.
    max_position_embeddings: int = field(8192, "behaviour", least=1, most=2**31 - 1)
    initializer_range: float = field(0.02, above=0, below=1)
    rms_norm_eps: float = field(1e-5, "behaviour", above=0, below=1)
    rope_theta: float = field(250_000.0, "behaviour", above=0)
    # What is classified of a text: the first state, or the mean state, of which a dense layer makes the pooled output
    # (bos, mean); or the mean of what the dense layer makes of all states (late).
    classifier_pooling: str = field("late", choices=("bos", "mean", "late"))
    tie_word_embeddings: bool = field(False, "form")  # False: words are predicted with a matrix of their own
    family: str = field("eurobert", "form")

    output: ClassVar[str] = "plain"
    hidden_act: ClassVar[str] = "silu"
    hidden_dropout_prob: ClassVar[float] = 0.0
    type_vocab_size: ClassVar[int] = 1

    @property
    def head_size(self) -> int:
        return self.head_dim


def _model(config, compute):
    from bertjax.models.eurobert.model import EuroBertModel

    return EuroBertModel(config, compute)


def _layer_flops(config: EuroBertConfig, length: int) -> int:
    hidden, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    shared = config.num_key_value_heads * config.head_dim
    # Query and output; key and value; three feed-forward matrices.
    per_token = 2 * hidden * queries + 2 * hidden * shared + 3 * hidden * config.intermediate_size
    attention = 2 * length * length * queries  # scores and weighted values, all heads
    return 2 * config.num_hidden_layers * (length * per_token + attention)


def _shown(params: dict) -> dict | None:
    kernels = params["bert"]["encoder"].get("layers", {})
    if "key_value" not in kernels.get("attention", {}):
        return None
    layers, hidden, heads, width = kernels["attention"]["query"]["kernel"].shape
    rows = len(params["bert"]["embeddings"]["word"]["embedding"])
    found = {
        "vocab_size": range(rows, rows - 128, -1),
        "hidden_size": (hidden,),
        "num_hidden_layers": (layers,),
        "num_attention_heads": (heads,),
        "num_key_value_heads": (kernels["attention"]["key_value"]["kernel"].shape[-2],),
        "head_dim": (width,),
        "intermediate_size": (kernels["input"]["kernel"].shape[-1],),
    }
    return found | ({"tie_word_embeddings": (False,)} if "masked_lm" in params else {})


def _attention(config: EuroBertConfig, params: dict, ids, segments, token_types):
    from bertjax.models.eurobert.model import attention_probabilities

    del token_types
    return attention_probabilities(config, params, ids, segments)


def _validate(config) -> None:
    heads, shared, width = (config.model[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    remedy = f"must divide model.num_attention_heads = {heads}"
    require(heads % shared == 0, "model.num_key_value_heads", shared, remedy)
    require(width % 2 == 0, "model.head_dim", width, "must be even: rotary positions halve it")


FAMILY = Family(
    model=_model,
    words=lambda config: "masked",
    layer_flops=_layer_flops,
    shown=_shown,
    validate=_validate,
    attention=_attention,
    model_types=("eurobert",),
    huggingface="bertjax.models.eurobert.huggingface",
    packs=True,
    config=EuroBertConfig,
)
