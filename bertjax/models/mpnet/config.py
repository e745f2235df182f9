"""The config of an MPNet model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import BertConfig, field, size


@dataclasses.dataclass(frozen=True)
class MPNetConfig(BertConfig):
    """The architecture of an MPNet.

    `max_position_embeddings` is the maximum sequence length. The field in config.json also counts the `position_offset`
    rows before the position of the first token.
    """

    vocab_size: int = size(30527)
    layer_norm_eps: float = field(1e-5, "behaviour", above=0, below=1)
    family: str = field("mpnet", "form")
    # The row of the position embeddings for the first token. It is the id of the padding token plus 1. transformers has
    # only the offset 2: the padding token has the id 1 in published vocabularies, and 0 in new vocabularies.
    position_offset: int = field(1, "form", least=1, most=2**31 - 1)

    # MPNetEncoder.compute_position_bias has these two values, whatever config.json states.
    relative_attention_num_buckets: ClassVar[int] = 32
    relative_attention_max_distance: ClassVar[int] = 128
    hidden_act: ClassVar[str] = "gelu"  # type: ignore[misc]  # in layers and in the head for words
    type_vocab_size: ClassVar[int] = 0  # type: ignore[misc]
    attention: ClassVar[str] = "xla"  # type: ignore[misc]  # no kernel adds a bias to the scores
    causal: ClassVar[bool] = False  # type: ignore[misc]
    positions: ClassVar[str] = "learned"  # type: ignore[misc]
    norm: ClassVar[str] = "post"  # type: ignore[misc]
    output: ClassVar[str] = "transform"  # type: ignore[misc]
