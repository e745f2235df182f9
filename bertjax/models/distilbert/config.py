"""The config of a DistilBERT model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import BertConfig, field, size


@dataclasses.dataclass(frozen=True)
class DistilBertConfig(BertConfig):
    """The architecture of a DistilBERT. Fields have the names of `BertConfig`; transformers uses other names."""

    num_hidden_layers: int = size(6, most=1000)
    hidden_act: str = field("gelu", "behaviour", choices=("gelu", "gelu_new", "relu"))
    # The dropout rate before the head of a sequence classifier or of multiple choice.
    pooled_dropout_prob: float = field(0.2, least=0, below=1)
    spans_dropout_prob: float = field(0.1, least=0, below=1)  # before the head for spans
    family: str = field("distilbert", "form")

    attention_output_dropout: ClassVar[bool] = False
    type_vocab_size: ClassVar[int] = 0  # type: ignore[misc]
    layer_norm_eps: ClassVar[float] = 1e-12  # type: ignore[misc]
