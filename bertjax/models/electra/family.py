"""ELECTRA (Clark et al. 2020): BERT whose embeddings have a size of their own, and whose pooler, which only classifiers
of texts have, is a dense layer with GELU. A discriminator has, as `replaced_tokens`, what tells replaced words."""

import dataclasses

from bertjax.models.bert.family import FAMILY as BERT
from bertjax.models.electra.config import ElectraConfig
from bertjax.models.family import projection_flops


def _model(config, compute):
    from bertjax.models.electra.model import ElectraModel

    return ElectraModel(config, compute)


def _layer_flops(config: ElectraConfig, length: int) -> int:
    return projection_flops(config, length) + BERT.layer_flops(config, length)


def _shown(params: dict) -> dict | None:
    found = BERT.shown(params)
    if found is None:
        return None
    return found | {"embedding_size": params["bert"]["embeddings"]["word"]["embedding"].shape[1:]}


FAMILY = dataclasses.replace(
    BERT,
    config=ElectraConfig,
    model=_model,
    layer_flops=_layer_flops,
    shown=_shown,
    model_types=("electra",),
    huggingface="bertjax.models.electra.huggingface",
    projected=lambda config, size: dataclasses.replace(config, embedding_size=size),
)
