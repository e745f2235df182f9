"""The fields of rotary positions: the scaling in a model config, and the forms of transformers 4 and 5 in config.json.

A model config stores a scaling as a text: the name of the scaling, and the fields of its class in `nn.positions`, such
as "linear factor=4.0". "" is no scaling. The field is `rope_scaling`, or `NAME_rope_scaling` for each kind of layer.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from bertjax.common.errors import UserError

if TYPE_CHECKING:
    from bertjax.nn.positions import Rotary, RotaryScaling

# {field of a rope object in config.json: field of the scaling}. All other fields of the scaling have equal names.
ORIGINAL = "original_max_position_embeddings"
NAMES = {ORIGINAL: "original_length"}
# {type of scaling: the fields of the rope object}, in the order of the text. All fields except the original
# length, beta_fast and beta_slow are required.
TYPES = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL, "beta_fast", "beta_slow"),
}
# The fields of config.json for rotary positions, in addition to rope_theta.
READ = ("rope_parameters", "rope_scaling", ORIGINAL)
# {field of a rope object: the only supported value}
SUPPORTED_VALUES = {"partial_rotary_factor": 1.0, "truncate": True}


class Rope(NamedTuple):
    """The rotary positions in a config.json.

    Attributes:
      theta: the base of the frequencies; None if config.json has none.
      scaling: the text of the scaling, "" for no scaling.
    """

    theta: float | None
    scaling: str = ""


def rotary_of(theta: float, scaling: str) -> "Rotary":
    """Returns the rotary positions of a model config.

    Args:
      theta: the base of the frequencies.
      scaling: the text of the scaling.
    """
    from bertjax.nn.positions import Rotary

    return Rotary(theta, parse_scaling(scaling))


def parse_scaling(text: str) -> "RotaryScaling | None":
    """Returns the scaling of a text such as "linear factor=4.0"; None for "".

    Raises:
      UserError: for an unknown scaling, or if the fields are not the fields of the scaling. The message is without the
        name of the field, because callers add it.
    """
    from bertjax.nn import positions

    if not text.strip():
        return None
    name, *settings = text.split()
    classes: dict[str, Any] = {
        "linear": positions.LinearScaling, "llama3": positions.Llama3Scaling, "yarn": positions.YarnScaling,
    }  # fmt: skip
    if name not in classes:
        raise UserError(f"choose one of {', '.join(classes)}, with its fields: 'linear factor=4.0'")
    values = dict(setting.partition("=")[::2] for setting in settings)
    fields: Any = dataclasses.fields(classes[name])
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    if len(values) < len(settings) or not required <= values.keys() <= {field.name for field in fields}:
        raise UserError(f"{name} needs the fields {', '.join(f'{field.name}=NUMBER' for field in fields)}")
    try:
        numbers = {field.name: field.type(values[field.name]) for field in fields if field.name in values}
    except ValueError:
        raise UserError(f"{name} needs numbers: {', '.join(f'{field.name}=NUMBER' for field in fields)}") from None
    if not all(math.isfinite(x) and x > 0 for x in numbers.values()):
        raise UserError(f"the fields of {name} must be above 0")
    if name == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise UserError("low_freq_factor must be below high_freq_factor")
    return classes[name](**numbers)


def validate_scaling(text: str, field: str, theta: float) -> None:
    """Raises `UserError` with the name of the field if `text` is not a scaling of frequencies with the base `theta`."""
    try:
        parse_scaling(text)
        if text.startswith("yarn") and theta <= 1:
            raise UserError(f"yarn needs a base above 1, and the base is {theta}")
    except UserError as error:
        raise UserError(f"config.{field} = {text!r}: {error}") from None


def read_rope(path: epath.Path, fields: Mapping[str, Any], kind: str = "") -> Rope:
    """Returns the rotary positions of a config.json.

    transformers 5 writes rope_parameters: one object, or an object for each kind of layer. transformers 4 writes
    rope_theta, and rope_scaling for a scaling. As in transformers 5, rope_scaling replaces rope_parameters unless it is
    empty, and the base of an object precedes rope_theta.

    Args:
      path: the file, for messages.
      fields: the content of the file.
      kind: the kind of layer, such as "full_attention"; "" if all layers have the same positions.

    Raises:
      UserError: if an object is damaged, or has a scaling that bertjax does not have.
    """
    name, rope = "rope_scaling", fields.get("rope_scaling")
    if rope is None or rope == {}:
        name, rope = "rope_parameters", fields.get("rope_parameters")
        if kind and isinstance(rope, dict) and kind in rope:
            name, rope = f"rope_parameters.{kind}", rope[kind]
    theta = fields.get("rope_theta")
    if rope is None:
        return Rope(theta)
    if not isinstance(rope, dict):
        raise UserError(f"{path}: {name} {rope!r} must be a JSON object")
    stated = _checked_type(path, name, rope)
    theta = rope.get("rope_theta", theta)
    if not kind and fields.get(ORIGINAL) is not None:  # transformers replaces the value of the object
        rope = rope | {ORIGINAL: fields[ORIGINAL]}
    return Rope(theta, "" if stated == "default" else _scaling_text(path, name, stated, rope, fields))


def _checked_type(path: epath.Path, name: str, rope: Mapping[str, Any]) -> str:
    """Returns the type of a rope object. Raises `UserError` for a type or a field that bertjax does not have."""
    if "rope_type" in rope and rope.get("type", rope["rope_type"]) != rope["rope_type"]:
        raise UserError(
            f"{path}: {name}.type is {rope['type']!r}; expected {rope['rope_type']!r}, the rope_type that transformers "
            f"reads; set rope_type, and delete type"
        )
    stated = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(stated, str) or (stated != "default" and stated not in TYPES):
        supported = ", ".join(map(repr, ("default", *TYPES)))
        raise UserError(f"{path}: {name}.rope_type {stated!r} is not supported; supported: {supported}")
    known = {"rope_type", "type", "rope_theta", *TYPES.get(stated, ()), *SUPPORTED_VALUES}
    for field, value in rope.items():
        if field not in known:
            raise UserError(f"{path}: {name}.{field} {value!r} is not supported; supported: {', '.join(sorted(known))}")
        if field in SUPPORTED_VALUES and value != SUPPORTED_VALUES[field]:
            raise UserError(
                f"{path}: {name}.{field} {value!r} is not supported; supported: {SUPPORTED_VALUES[field]!r}"
            )
    return stated


def _scaling_text(path: epath.Path, name: str, stated: str, rope: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Returns the text of the scaling in an object of config.json."""
    stated_fields = {ORIGINAL: fields.get("max_position_embeddings")} | dict(rope)
    settings = []
    for field in TYPES[stated]:
        value = stated_fields.get(field)
        if value is None and field in ("beta_fast", "beta_slow"):
            continue
        if type(value) not in (int, float):
            raise UserError(f"{path}: {name}.{field} is {value!r}; expected a number")
        settings.append(f"{NAMES.get(field, field)}={value}")
    try:
        scaling: Any = parse_scaling(" ".join([stated, *settings]))
    except UserError as error:
        raise UserError(f"{path}: {name} {dict(rope)!r} is not supported: {error}") from None
    # The text contains all fields, so that equal scalings have equal texts.
    return " ".join([stated, *(f"{field}={value}" for field, value in dataclasses.asdict(scaling).items())])


def objects_of_kinds(path: epath.Path, parameters: Any, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Returns rope_parameters with an object for each kind of layer. Raises `UserError` for another form.

    Args:
      path: the file, for messages.
      parameters: rope_parameters in the file.
      kinds: {name: kind of layer in config.json}.
    """
    if not isinstance(parameters, dict) or parameters.keys() - set(kinds.values()):
        keys = " and ".join(kinds.values())
        raise UserError(f"{path}: rope_parameters {parameters!r} must be a JSON object with the keys {keys}")
    return parameters


def rope_fields_of_kinds(config: Any, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Returns rope_parameters with an object for each kind of layer.

    Args:
      config: the model config, with the fields `NAME_rope_theta` and `NAME_rope_scaling` for each name.
      kinds: {name: kind of layer in config.json}.
    """
    return {
        kind: rope_fields(getattr(config, f"{name}_rope_theta"), getattr(config, f"{name}_rope_scaling"))
        for name, kind in kinds.items()
    }


def rope_fields(theta: float, scaling: str = "") -> dict[str, Any]:
    """Returns the object of config.json for a base and the text of a scaling."""
    kind = scaling.split()[0] if scaling else "default"
    settings = parse_scaling(scaling)
    names = {ours: theirs for theirs, ours in NAMES.items()}
    values = {} if settings is None else dataclasses.asdict(settings)  # type: ignore[call-overload]
    return {"rope_type": kind, "rope_theta": theta, **{names.get(name, name): x for name, x in values.items()}}
