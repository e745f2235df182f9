"""The config of a NomicBERT model."""

import dataclasses

from bertjax.config.model_config import field, size
from bertjax.models.rotary_bert.config import RotaryBertConfig


@dataclasses.dataclass(frozen=True)
class NomicBertConfig(RotaryBertConfig):
    """The architecture of a NomicBERT. The defaults are nomic-embed-text-v1.5."""

    hidden_act: str = field("silu", "behaviour", choices=("gelu", "gelu_new", "relu", "silu"))
    hidden_dropout_prob: float = field(0.0, least=0, below=1)
    max_position_embeddings: int = field(2048, "behaviour", least=1, most=2**31 - 1)
    type_vocab_size: int = size(2)
    rope_theta: float = field(1000.0, "behaviour", above=0)
    family: str = field("nomic_bert", "form")
