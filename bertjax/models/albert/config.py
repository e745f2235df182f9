"""The config of an ALBERT model."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import BertConfig, field, size


@dataclasses.dataclass(frozen=True)
class AlbertConfig(BertConfig):
    """The architecture of an ALBERT. The defaults are ALBERT-base (Lan et al. 2019, table 1; version 2)."""

    vocab_size: int = size(30000)
    embedding_size: int = size(128)
    # The layers are split into groups of consecutive layers. The layers of a group share their params.
    num_hidden_groups: int = size(1, most=1000)
    hidden_dropout_prob: float = field(0.0, least=0, below=1)
    attention_probs_dropout_prob: float = field(0.0, least=0, below=1)
    # The dropout rate before the head of a sequence classifier or of multiple choice.
    pooled_dropout_prob: float = field(0.1, least=0, below=1)
    family: str = field("albert", "form")

    norm: ClassVar[str] = "post"  # type: ignore[misc]
    positions: ClassVar[str] = "learned"  # type: ignore[misc]
    output: ClassVar[str] = "transform"  # type: ignore[misc]
    projects_embeddings: ClassVar[bool] = True  # type: ignore[assignment]  # even to an equal size

    @property
    def layers_per_group(self) -> int:
        """The number of layers that share their params."""
        return self.num_hidden_layers // self.num_hidden_groups
