"""The config of an XLNet model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import ModelConfig, field, size


@dataclasses.dataclass(frozen=True)
class XlnetConfig(ModelConfig):
    """The architecture of an XLNet. Fields have the names of `BertConfig`. The defaults are XLNet-base."""

    vocab_size: int = size(32000)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(12, most=1000)
    num_attention_heads: int = size(12)
    intermediate_size: int = size(3072)
    hidden_act: str = field("gelu", "behaviour", choices=("gelu", "gelu_new", "relu"))
    hidden_dropout_prob: float = field(0.1, least=0, below=1)
    attention_probs_dropout_prob: float = field(0.1, least=0, below=1)
    # The maximum sequence length. No param depends on this field.
    max_position_embeddings: int = field(512, least=1, most=2**31 - 1)
    # The number of hidden states per layer in the recurrent memory (`data.stream`).
    memory_length: int = field(384, least=1, most=2**31 - 1)
    initializer_range: float = field(0.02, above=0, below=1)
    layer_norm_eps: float = field(1e-12, "behaviour", above=0, below=1)
    family: str = field("xlnet", "form")

    # Text A, text B and [CLS]. Attention depends on whether two tokens have the same type.
    type_vocab_size: ClassVar[int] = 3

    @property
    def spans_dropout_prob(self) -> float:
        """The dropout rate before the head for spans. `XlnetModel` applies the dropout before the pooler."""
        return self.hidden_dropout_prob
