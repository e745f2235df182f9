"""The base class of the configs of NomicBERT, GTE and Jina Embeddings v3."""

import dataclasses

from bertjax.config.model_config import ModelConfig, field, size


@dataclasses.dataclass(frozen=True)
class RotaryBertConfig(ModelConfig):
    """The architecture of a BERT with rotary positions. Fields are named as in Hugging Face's config.json."""

    vocab_size: int = size(30528)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(12, most=1000)
    num_attention_heads: int = size(12)
    intermediate_size: int = size(3072)
    hidden_act: str = field("gelu", "behaviour", choices=("gelu", "gelu_new", "relu", "silu"))
    hidden_dropout_prob: float = field(0.1, least=0, below=1)
    attention_probs_dropout_prob: float = field(0.0, least=0, below=1)
    # The maximum sequence length. No param depends on this field.
    max_position_embeddings: int = field(8192, "behaviour", least=1, most=2**31 - 1)
    type_vocab_size: int = size(1)
    initializer_range: float = field(0.02, above=0, below=1)
    layer_norm_eps: float = field(1e-12, "behaviour", above=0, below=1)
    rope_theta: float = field(10_000.0, "behaviour", above=0)
    rope_scaling: str = field("", "behaviour")  # see `models.rope`
