"""The config of a GTE model."""

import dataclasses

from bertjax.config.model_config import field, size
from bertjax.models.rotary_bert.config import RotaryBertConfig


@dataclasses.dataclass(frozen=True)
class GteConfig(RotaryBertConfig):
    """The architecture of a GTE. The defaults are gte-multilingual-base."""

    vocab_size: int = size(250048)
    type_vocab_size: int = field(1, "size", least=0, most=2**31 - 1)  # 0: no embeddings of token types
    rope_theta: float = field(160_000.0, "behaviour", above=0)
    family: str = field("gte", "form")
