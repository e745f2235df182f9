"""Families of models: BERT, the two LSTMs of ELMo, or somebody else's. What the package wants to know about a model, it
asks its family.

A family is a file or a folder, found by the name in `config.model.family`. It is made of the parts in `model/`, which
know no family, and its module is imported without JAX's modules, which its functions import when they are called.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_collections
import numpy as np

from bertjax.config import BertConfig, Compute
from bertjax.registry import Registry

if TYPE_CHECKING:
    import flax.linen as nn


@dataclasses.dataclass(frozen=True)
class Family:
    """What the package asks about a family.

    Args:
      model: (config, compute) -> the encoder, a `model.encoder_model.EncoderModel` or a module with its methods.
      words: config -> how it can learn words. masked: it fills in those that are hidden; next: each token sees those
        before it, and predicts the next; neighbours: some states see those before, others those after.
      layer_flops: (config, tokens of a row) -> matrix-multiply FLOPs of its layers for one row, forwards.
      sizes: params of the encoder -> {field of its config: value} as far as they show it; None if they are another
        family's.
      validate: whole config -> None. Raises `UserError` for what this family cannot do.
      attention: (config, params of the encoder, token ids `[1, length]`) -> probabilities `[layers, heads, queries,
        keys]`; None if it has no attention to show.
      new_cache: (config, batch, tokens, dtype) -> an empty cache, with which the encoder's `decode` continues a text;
        None if it cannot.
      packs: whether several sequences can share a row, each as a segment with positions of its own.
      config: a frozen dataclass of `config.field`s, which say their limits. Names are those of `BertConfig` where the
        parts read them.
    """

    model: Callable[[BertConfig, Compute], "nn.Module"]
    words: Callable[[BertConfig], str]
    layer_flops: Callable[[BertConfig, int], int]
    sizes: Callable[[dict], dict[str, int] | None]
    validate: Callable[[Any], None] = lambda config: None
    attention: Callable[[BertConfig, dict, np.ndarray], np.ndarray] | None = None
    new_cache: Callable[[BertConfig, int, int, str], Any] | None = None
    packs: bool = False
    config: type = BertConfig


FAMILIES: Registry[Family] = Registry(
    "family",
    "model.family",
    {name: f"bertjax.families.{name}:FAMILY" for name in ("bert", "lstms")},
    plural="families",
)
register = FAMILIES.register


def of(config: BertConfig) -> Family:
    """Returns the family of a model's config."""
    return FAMILIES.get(config.family)


def config_of(config) -> BertConfig:
    """Returns the model's config of a whole config."""
    return FAMILIES.get(config.model.family).config(**config.model)


def model_fields(family: str, **fields) -> ml_collections.ConfigDict:
    """Returns `config.model` for a family: its defaults, and these fields."""
    return ml_collections.ConfigDict(dataclasses.asdict(FAMILIES.get(family).config(family=family, **fields)))


def words(config) -> str:
    """Returns how pre-training with a whole config learns words, see `Family.words`."""
    return FAMILIES.get(config.model.family).words(config_of(config))
