"""The registry of model families, and functions that use the family of a config.

`config.model.family` is the name of a family. A folder of this package is a family if it contains a module `family`.
The registry imports this module without JAX; methods of the family import JAX when they are called.

A run config is the `ConfigDict` of a run. A model config is `config.model`, converted to the frozen dataclass of the
family.
"""

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import ml_collections
import numpy as np

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry, own_in_folders
from bertjax.config.model_config import Compute, ModelConfig
from bertjax.models.family import HuggingFaceFamily, LmType, ModelFamily, Recurrent

if TYPE_CHECKING:
    from bertjax.models.huggingface_format import HuggingFaceFormat
    from bertjax.nn.encoder_model import EncoderModel

FAMILIES: Registry[ModelFamily] = Registry(
    "family",
    "model.family",
    own_in_folders(__package__, __file__, "family", "FAMILY", renamed={"elmo": "lstms"}),
    plural="families",
    base=ModelFamily,
)
register = FAMILIES.register
DEFAULT = Compute()


def family_of(config: ModelConfig) -> ModelFamily:
    """Returns the family of a model config."""
    return FAMILIES.get(config.family)


def encoder_of(config: ModelConfig, compute: Compute = DEFAULT) -> "EncoderModel":
    """Returns the unbound encoder of a model config, see `ModelFamily.build`."""
    return family_of(config).build(config, compute)


def config_of(config: ml_collections.ConfigDict) -> Any:
    """Returns the model config of a run config: an instance of the family's `config_class`."""
    family = FAMILIES.get(config.model.family)
    ignored = all_field_names() - _field_names(family) if adopts_model(config) else ()
    return family.config_class(**{name: value for name, value in config.model.items() if name not in ignored})


def lm_type_of(config: ml_collections.ConfigDict) -> LmType:
    """Returns the `lm_type` of the model of a run config."""
    return FAMILIES.get(config.model.family).lm_type(config_of(config))


def model_fields(family: str, **fields: Any) -> ml_collections.ConfigDict:
    """Returns `config.model` for a family.

    Args:
      family: the name of the family.
      **fields: values of fields; other fields get their defaults.
    """
    config_class = FAMILIES.get(family).config_class
    return ml_collections.ConfigDict(dataclasses.asdict(config_class(family=family, **fields)))


def adopts_model(config: ml_collections.ConfigDict) -> bool:
    """Returns whether the model config of `init_checkpoint` replaces `config.model`.

    This is the case in fine-tuning, and in pre-training with `adapt.model`. The checkpoint is read after the config is
    validated, so that the family of the checkpoint is not available here.
    """
    return "stages" not in config or config.adapt.model


def possible_config_classes(config: ml_collections.ConfigDict) -> list[type]:
    """Returns the possible config classes of the model of a run: all families if `adopts_model`, else one family."""
    if adopts_model(config):
        return [family.config_class for family in _loadable_families().values()]
    return [FAMILIES.get(config.model.family).config_class]


def add_field(config: ml_collections.ConfigDict, name: str) -> None:
    """Adds a field of any family to `config.model`, with its default. Does nothing if no family has the field.

    Args:
      config: a run config for which `adopts_model` is true.
      name: the name of the field.
    """
    if name in all_field_names():
        with config.model.unlocked():
            config.model[name] = field_default(name)


def field_default(name: str) -> Any:
    """Returns the default of a model field in the first family with this field."""
    families = _loadable_families().values()
    return next(getattr(family.config_class(), name) for family in families if name in _field_names(family))


def all_field_names() -> set[str]:
    """Returns the names of the model fields of all families."""
    return {name for family in _loadable_families().values() for name in _field_names(family)}


def _field_names(family: ModelFamily) -> set[str]:
    return {field.name for field in dataclasses.fields(family.config_class)}


def _loadable_families() -> dict[str, ModelFamily]:
    """Returns {name: family}. Omits families whose entry point raises an error."""
    families = {}
    for name in FAMILIES.names():
        with contextlib.suppress(UserError):
            families[name] = FAMILIES.get(name)
    return families


def by_model_type() -> dict[str, HuggingFaceFamily]:
    """Returns {`model_type` of transformers: family}."""
    return {
        model_type: family
        for family in _loadable_families().values()
        if isinstance(family, HuggingFaceFamily)
        for model_type in family.model_types
    }


def recurrent_family_of(config: ModelConfig) -> Recurrent:
    """Returns the family of a model config with a recurrent memory.

    Raises:
      UserError: if the family has no recurrent memory.
    """
    family = family_of(config)
    if not isinstance(family, Recurrent):
        raise UserError(f"config.model.family = {config.family!r}: must have a recurrent memory; set data.stream=False")
    return family


def huggingface_of(config: ModelConfig) -> "HuggingFaceFormat":
    """Returns the Hugging Face format of the family of a model config.

    Raises:
      UserError: if transformers does not have the family. The message is the field and its value only, because callers
        add the remedy.
    """
    family = family_of(config)
    if not isinstance(family, HuggingFaceFamily):
        raise UserError(f"model.family = {config.family!r}")
    return family.huggingface


def layer_ids(config: ModelConfig, path: tuple[str, ...]) -> np.ndarray | None:
    """Returns the layer numbers of a param; None for a param of a head, see `ModelFamily.layer_ids`."""
    return family_of(config).layer_ids(config, path[1:]) if path[0] == "bert" else None
