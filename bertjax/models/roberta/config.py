"""The config of a RoBERTa model."""

import dataclasses

from bertjax.config.model_config import BertConfig, field, size


@dataclasses.dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """The architecture of a RoBERTa.

    `max_position_embeddings` is the maximum sequence length. The field in config.json also counts the `position_offset`
    rows before the position of the first token.
    """

    vocab_size: int = size(50265)
    hidden_act: str = field("gelu", "behaviour", choices=("gelu", "gelu_new", "relu"))
    type_vocab_size: int = size(1)
    layer_norm_eps: float = field(1e-5, "behaviour", above=0, below=1)
    family: str = field("roberta", "form")
    # The row of the position embeddings for the first token. It is the id of [PAD] plus 1, as in fairseq. The id is
    # 1 in published vocabularies and 0 in new vocabularies.
    position_offset: int = field(1, "form", least=1, most=2**31 - 1)
    # The model type in transformers. The three types have the same architecture.
    variant: str = field("roberta", "form", choices=("roberta", "xlm-roberta", "camembert"))
