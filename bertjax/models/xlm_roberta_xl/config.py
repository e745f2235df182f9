"""The config of an XLM-RoBERTa-XL model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import field, size
from bertjax.models.roberta.config import RobertaConfig


@dataclasses.dataclass(frozen=True)
class XlmRobertaXlConfig(RobertaConfig):
    """The architecture of an XLM-RoBERTa-XL. The defaults are the model XL (Goyal et al. 2021, section 3)."""

    vocab_size: int = size(250880)
    hidden_size: int = size(2560)
    num_hidden_layers: int = size(36, most=1000)
    num_attention_heads: int = size(32)
    intermediate_size: int = size(10240)
    family: str = field("xlm_roberta_xl", "form")
    variant: str = field("xlm-roberta-xl", "form", choices=("xlm-roberta-xl",))

    norm: ClassVar[str] = "pre"  # type: ignore[misc]
    positions: ClassVar[str] = "learned"  # type: ignore[misc]
    output: ClassVar[str] = "transform"  # type: ignore[misc]
