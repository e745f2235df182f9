"""The config of a RoBERTa model."""

import dataclasses

from bertjax.config.model_config import BertConfig, field, size


@dataclasses.dataclass(frozen=True)
class RobertaConfig(BertConfig):
    """The architecture of a RoBERTa. `max_position_embeddings` are those that tokens can have: theirs, less two."""

    vocab_size: int = size(50265)
    hidden_act: str = field("gelu", "behaviour", choices=("gelu", "gelu_new", "relu"))
    type_vocab_size: int = size(1)
    layer_norm_eps: float = field(1e-5, "behaviour", above=0, below=1)
    family: str = field("roberta", "form")
    # Rows of the table of positions before that of the first token. fairseq counts positions from the id of padding on,
    # which is 1 in published vocabularies and 0 in those that are learnt here.
    position_offset: int = field(1, "form", least=1, most=2**31 - 1)
    # The name of its classes in transformers, which are the same.
    variant: str = field("roberta", "form", choices=("roberta", "xlm-roberta", "camembert"))
