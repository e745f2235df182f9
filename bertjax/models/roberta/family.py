"""RoBERTa (Liu et al. 2019), and XLM-R and CamemBERT, which are RoBERTas of other languages: BERT without token types,
whose table of positions begins with rows that no token has."""

import dataclasses

from bertjax.config.model_config import BertConfig, field, size
from bertjax.models.bert.family import FAMILY as BERT


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


def _model(config, compute):
    from bertjax.models.roberta.model import RobertaModel

    return RobertaModel(config, compute)


def _shown(params: dict) -> dict | None:
    found = BERT.shown(params)
    if found is None or "max_position_embeddings" not in found:
        return found
    (rows,) = found["max_position_embeddings"]
    return found | {"max_position_embeddings": range(rows, 0, -1)}


FAMILY = dataclasses.replace(
    BERT,
    model=_model,
    config=RobertaConfig,
    shown=_shown,
    model_types=("roberta", "xlm-roberta", "camembert"),
    huggingface="bertjax.models.roberta.huggingface",
    projected=None,
)
