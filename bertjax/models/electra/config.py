"""The config of an ELECTRA model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import BertConfig, field, size


@dataclasses.dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """The architecture of an ELECTRA, generator or discriminator. The defaults are ELECTRA-small."""

    embedding_size: int = size(128)
    hidden_size: int = size(256)
    num_attention_heads: int = size(4)
    intermediate_size: int = size(1024)
    family: str = field("electra", "form")

    hidden_act: ClassVar[str] = "gelu"  # type: ignore[misc]  # in layers and in heads
    output: ClassVar[str] = "transform"  # type: ignore[misc]  # the head projects hidden states to the embedding size
