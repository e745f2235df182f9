"""The registry of model families, and the queries of a config about its family.

`config.model.family` names a family. Each folder beside this module that has a module `family` is a family. That module
is imported without the modules of JAX, which its functions import when they are called.
"""

import contextlib
import dataclasses
import importlib
from types import ModuleType

import ml_collections
import numpy as np

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry, own_in_folders
from bertjax.config.model_config import BertConfig
from bertjax.models.family import Family

FAMILIES: Registry[Family] = Registry(
    "family",
    "model.family",
    own_in_folders(__package__, __file__, "family", "FAMILY", renamed={"elmo": "lstms"}),
    plural="families",
)
register = FAMILIES.register


def of(config: BertConfig) -> Family:
    """Returns the family of a model's config."""
    return FAMILIES.get(config.family)


def config_of(config) -> BertConfig:
    """Returns the model's config of a whole config."""
    family = FAMILIES.get(config.model.family)
    others = all_fields() - _names(family) if is_adopted(config) else ()
    return family.config(**{name: value for name, value in config.model.items() if name not in others})


def model_fields(family: str, **fields) -> ml_collections.ConfigDict:
    """Returns `config.model` for a family: its defaults, and these fields."""
    return ml_collections.ConfigDict(dataclasses.asdict(FAMILIES.get(family).config(family=family, **fields)))


def is_adopted(config) -> bool:
    """Whether the model is that of `init_checkpoint`, which is read later: in fine-tuning, and with `adapt.model`."""
    return "stages" not in config or config.adapt.model


def configs_that_may_be(config) -> list[type]:
    """Returns the class of the model's config, or those of all families if the model `is_adopted`."""
    return [each.config for each in (_loaded().values() if is_adopted(config) else [FAMILIES.get(config.model.family)])]


def add_field(config, name: str) -> None:
    """Adds a field that models of another family have to `config.model` of a run whose model `is_adopted`, with its
    default there. Does nothing if no family has the field."""
    if name in all_fields():
        with config.model.unlocked():
            config.model[name] = default_of(name)


def default_of(name: str):
    """Returns the default of a field that models of a family have, the first of several."""
    return next(getattr(family.config(), name) for family in _loaded().values() if name in _names(family))


def all_fields() -> set[str]:
    """Returns the names of the fields of all families."""
    return {name for family in _loaded().values() for name in _names(family)}


def _names(family: Family) -> set[str]:
    return {each.name for each in dataclasses.fields(family.config)}


def _loaded() -> dict[str, Family]:
    """Returns the families by their names, without entry points that do not load."""
    found = {}
    for name in FAMILIES.names():
        with contextlib.suppress(UserError):
            found[name] = FAMILIES.get(name)
    return found


def by_model_type() -> dict[str, Family]:
    """Returns the families by the `model_type`s that they read."""
    return {kind: family for family in _loaded().values() for kind in family.model_types}


def module_of(family: Family) -> ModuleType:
    """Returns the module that reads and writes Hugging Face's folders of a family."""
    return importlib.import_module(family.huggingface)


def layer_numbers(config: BertConfig, path: tuple[str, ...]) -> np.ndarray | None:
    """Returns the layers of a param of a model that has an encoder as `bert`, see `Family.layer_numbers`."""
    return of(config).layer_numbers(config, path[1:]) if path[0] == "bert" else None


def words(config) -> str:
    """Returns how pre-training with a whole config learns words, see `Family.words`."""
    return FAMILIES.get(config.model.family).words(config_of(config))
