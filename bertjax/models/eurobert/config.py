"""The config of a EuroBERT model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import ModelConfig, field, size


@dataclasses.dataclass(frozen=True)
class EuroBertConfig(ModelConfig):
    """The architecture of a EuroBERT. The defaults are EuroBERT-210m.

    Fields are named as in Hugging Face's config.json. EuroBERT has no dropout, as in transformers.
    """

    vocab_size: int = size(128256)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(12, most=1000)
    num_attention_heads: int = size(12)
    # The number of heads of keys and values (grouped-query attention). It must divide num_attention_heads.
    num_key_value_heads: int = size(12)
    head_dim: int = size(64)
    intermediate_size: int = size(3072)
    # The maximum sequence length. No param depends on this field.
    max_position_embeddings: int = field(8192, "behaviour", least=1, most=2**31 - 1)
    initializer_range: float = field(0.02, above=0, below=1)
    rms_norm_eps: float = field(1e-5, "behaviour", above=0, below=1)
    rope_theta: float = field(250_000.0, "behaviour", above=0)
    rope_scaling: str = field("", "behaviour")  # see `models.rope`
    # The pooled output of a text. bos: the dense layer of the first state. mean: the dense layer of the mean state.
    # late: the mean over all hidden states of the dense layer.
    classifier_pooling: str = field("late", choices=("bos", "mean", "late"))
    tie_word_embeddings: bool = field(False, "form")  # False: the masked-LM head has separate output embeddings
    family: str = field("eurobert", "form")

    hidden_act: ClassVar[str] = "silu"
    hidden_dropout_prob: ClassVar[float] = 0.0
    type_vocab_size: ClassVar[int] = 1

    @property
    def head_size(self) -> int:
        """The size of a head."""
        return self.head_dim
