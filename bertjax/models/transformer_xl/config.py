"""The config of a Transformer-XL model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import ModelConfig, field, size


@dataclasses.dataclass(frozen=True)
class TransformerXLConfig(ModelConfig):
    """The architecture of a Transformer-XL. The defaults are the base model for WikiText-103.

    Fields that `BertConfig` also has have the same names.
    """

    vocab_size: int = size(267735)
    hidden_size: int = size(410)
    num_hidden_layers: int = size(16, most=1000)
    num_attention_heads: int = size(10)
    intermediate_size: int = size(2100)
    hidden_act: str = field("relu", "behaviour", choices=("relu", "gelu", "gelu_new"))
    hidden_dropout_prob: float = field(0.1, least=0, below=1)
    attention_probs_dropout_prob: float = field(0.0, least=0, below=1)
    # The maximum row length in tokens. No param depends on this field.
    max_position_embeddings: int = field(8192, "behaviour", least=1, most=2**31 - 1)
    # The number of hidden states per layer in the recurrent memory.
    memory_length: int = field(150, "behaviour", least=1, most=2**31 - 1)
    # The maximum relative distance. Larger distances are clamped to it. 0 for no limit.
    clamp_length: int = field(0, "behaviour", least=0, most=2**31 - 1)
    # Whether the layers have separate biases u and v (True), or share them (False).
    untie_biases: bool = field(False, "form")
    tie_word_embeddings: bool = field(True, "form")
    initializer_range: float = field(0.02, above=0, below=1)
    layer_norm_eps: float = field(1e-5, "behaviour", above=0, below=1)
    family: str = field("transformer_xl", "form")

    type_vocab_size: ClassVar[int] = 0
