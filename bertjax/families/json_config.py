"""A model's config from the fields of a JSON file of somebody else's."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TypeVar

import ml_collections
from etils import epath

from bertjax import families
from bertjax.config import UserError
from bertjax.validation import validate_model

T = TypeVar("T")
# Activations: name in transformers -> our name.
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "relu": "relu"}


def build(
    path: epath.Path,
    config: type[T],
    fields: Mapping,
    required: Collection[str],
    own: Collection[str],
    names: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """Builds a config. Raises `UserError` if a field is missing or has an invalid value.

    Args:
      config: its class.
      fields: by our names; those that the class does not have are passed over.
      required: those that must be given.
      own: fields of the class that such a file does not have.
      names: {field: what the file calls it}, for messages.
    """
    known = {field.name: field for field in dataclasses.fields(config) if field.name not in own}
    for name in required:
        if name not in fields:
            raise UserError(f"{path}: {names.get(name, name)} is missing; the config of such a model needs it")
    for name, field in known.items():
        value, numbers = fields.get(name, field.default), (int, float) if field.type is float else (field.type,)
        if type(value) not in numbers:
            kind = field.type.__name__
            raise UserError(f"{path}: {names.get(name, name)} is {value!r}, which is not a valid {kind}")
    found = config(**{name: fields[name] for name in known if name in fields})
    whole = ml_collections.ConfigDict(dict(model=dataclasses.asdict(found), stages={}, adapt=dict(model=False)))
    try:
        validate_model(whole)
        families.FAMILIES.get(found.family).validate(whole)
    except UserError as error:
        said = re.sub(r"(?:config\.)?model\.(\w+)", lambda field: names.get(field[1], field[1]), str(error))
        raise UserError(f"{path}: {said}") from None
    return found


def require(path: epath.Path, fields: Mapping, expected: Mapping) -> None:
    """Raises `UserError` if a field has another value than the only one that is supported."""
    for name, value in expected.items():
        if fields.get(name, value) != value:
            raise UserError(f"{path}: {name} {fields[name]!r} is not supported; supported: {value!r}")
    if "quantization_config" in fields:
        raise UserError(f"{path}: quantization_config: quantized weights are not supported")


def activation(path: epath.Path, fields: Mapping, name: str) -> str:
    """Returns our name of an activation. Raises `UserError` for one that we do not have."""
    given = fields.get(name, "gelu")
    if not isinstance(given, str) or given not in ACTIVATIONS:
        raise UserError(f"{path}: {name} {given!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[given]
