"""DistilBERT (Sanh et al. 2019): BERT without token types, whose pooler, which only classifiers of texts have, is a
dense layer with ReLU."""

import dataclasses

from bertjax.models.bert.family import FAMILY as BERT
from bertjax.models.distilbert.config import DistilBertConfig


def _model(config, compute):
    from bertjax.models.distilbert.model import DistilBertModel

    return DistilBertModel(config, compute)


FAMILY = dataclasses.replace(
    BERT,
    config=DistilBertConfig,
    model=_model,
    model_types=("distilbert",),
    huggingface="bertjax.models.distilbert.huggingface",
    projected=None,
)
