"""ELECTRA (Clark et al. 2020): BERT whose embeddings have a size of their own, and whose pooler, which only classifiers
of texts have, is a dense layer with GELU. A discriminator has, as `replaced_tokens`, what tells replaced words."""

import dataclasses
from typing import ClassVar

from bertjax.config.model_config import BertConfig, field, size
from bertjax.models.bert.family import FAMILY as BERT
from bertjax.models.families import projection_flops


@dataclasses.dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """The architecture of an ELECTRA, generator or discriminator; the defaults are the small ones'."""

    embedding_size: int = size(128)
    hidden_size: int = size(256)
    num_attention_heads: int = size(4)
    intermediate_size: int = size(1024)
    family: str = field("electra", "form")

    hidden_act: ClassVar[str] = "gelu"  # output layers have it, too
    output: ClassVar[str] = "transform"  # which brings states to the size of embeddings


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
