"""RoBERTa (Liu et al. 2019), and XLM-R and CamemBERT, which are RoBERTas of other languages: BERT without token types,
whose table of positions begins with rows that no token has."""

import dataclasses

from bertjax.models.bert.family import FAMILY as BERT
from bertjax.models.roberta.config import RobertaConfig


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
