"""The config of a NeoBERT model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import ModelConfig, field, size


@dataclasses.dataclass(frozen=True)
class NeoBertConfig(ModelConfig):
    """The architecture of a NeoBERT. The defaults are the published model.

    Fields that `BertConfig` also has have the same names.
    """

    vocab_size: int = size(30522)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(28, most=1000)
    num_attention_heads: int = size(12)
    # The output size of the gate. The field in config.json is 3/2 of this size: 3072 for the published model.
    intermediate_size: int = size(2048)
    # The maximum sequence length. No param depends on this field.
    max_position_embeddings: int = field(4096, "behaviour", least=1, most=2**31 - 1)
    initializer_range: float = field(0.02, above=0, below=1)
    norm_eps: float = field(1e-5, "behaviour", above=0, below=1)
    classifier_dropout: float = field(0.1, least=0, below=1)  # the only dropout: before and after the pooler
    family: str = field("neobert", "form")

    hidden_act: ClassVar[str] = "silu"
    type_vocab_size: ClassVar[int] = 1

    @property
    def hidden_dropout_prob(self) -> float:
        """The dropout rate before a head. The modules in `nn/` read this name."""
        return self.classifier_dropout

    @property
    def tie_word_embeddings(self) -> bool:
        """The masked-LM head has separate output embeddings."""
        return False
