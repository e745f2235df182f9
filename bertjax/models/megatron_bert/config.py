"""The config of a MegatronBERT model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import BertConfig, field, size


@dataclasses.dataclass(frozen=True)
class MegatronBertConfig(BertConfig):
    """The architecture of a MegatronBERT. The defaults are the published model of 345 million params."""

    vocab_size: int = size(29056)
    hidden_size: int = size(1024)
    num_hidden_layers: int = size(24, most=1000)
    num_attention_heads: int = size(16)
    intermediate_size: int = size(4096)
    hidden_act: str = field("gelu", "behaviour", choices=("gelu", "gelu_new", "relu"))
    family: str = field("megatron_bert", "form")

    norm: ClassVar[str] = "pre"  # type: ignore[misc]
    positions: ClassVar[str] = "learned"  # type: ignore[misc]
    output: ClassVar[str] = "transform"  # type: ignore[misc]
