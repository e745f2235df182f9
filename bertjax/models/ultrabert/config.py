"""The config of an UltraBERT model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import ModelConfig, field, size


@dataclasses.dataclass(frozen=True)
class UltraBertConfig(ModelConfig):
    """The architecture of an UltraBERT. By default, the layers have the sizes of BERT-base.

    Fields are named as in Hugging Face's config.json, except for the fields of layer types.
    """

    vocab_size: int = size(32000)
    hidden_size: int = size(768)
    num_hidden_layers: int = size(12, most=1000)
    num_attention_heads: int = size(12)
    # The number of heads of keys and values (grouped-query attention). It must divide num_attention_heads.
    num_key_value_heads: int = size(12)
    head_dim: int = size(64)
    intermediate_size: int = size(3072)
    prediction_head_size: int = size(768)  # of the states between the two dense layers of the masked-LM head
    # The maximum sequence length. No param depends on this field.
    max_position_embeddings: int = field(32768, "behaviour", least=1, most=2**31 - 1)
    initializer_range: float = field(0.02, above=0, below=1)
    rms_norm_eps: float = field(1e-6, "behaviour", above=0, below=1)
    # The types of the layers, "full" or "sliding", separated by commas. The list repeats up to the last layer.
    layer_types: str = field("sliding,sliding,full", "form")
    # The largest distance to a token, to either side, in sliding layers.
    sliding_window: int = field(128, "behaviour", least=1, most=2**31 - 1)
    full_rope_theta: float = field(2_560_000.0, "behaviour", above=0)
    sliding_rope_theta: float = field(10_000.0, "behaviour", above=0)
    full_rope_scaling: str = field("", "behaviour")  # see `models.rope`
    sliding_rope_scaling: str = field("", "behaviour")
    # cls: a classifier reads the state of the first token. mean: a classifier reads the mean state.
    classifier_pooling: str = field("cls", choices=("cls", "mean"))
    classifier_dropout: float = field(0.0, least=0, below=1)
    tie_word_embeddings: bool = field(False, "form")  # False: the masked-LM head has separate output embeddings
    family: str = field("ultrabert", "form")

    hidden_act: ClassVar[str] = "silu"
    type_vocab_size: ClassVar[int] = 1

    @property
    def hidden_dropout_prob(self) -> float:
        """The dropout rate before a head. The modules in `nn/` read this name."""
        return self.classifier_dropout

    @property
    def head_size(self) -> int:
        """The size of a head."""
        return self.head_dim

    @property
    def types(self) -> list[str]:
        """The type of each layer, "full" or "sliding"."""
        types = self.layer_types.split(",")
        return [types[number % len(types)] for number in range(self.num_hidden_layers)]
