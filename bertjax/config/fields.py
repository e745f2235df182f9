"""Finds a field of a config by its dotted name, and parses the value of the field from text."""

import ast
import contextlib
import dataclasses
import difflib
import fractions
from collections.abc import Callable, Iterable
from typing import Any

from ml_collections import ConfigDict

from bertjax.common.errors import UserError


@dataclasses.dataclass
class Field:
    """A value of a config: `holder[key]`, with the full name `name` and the type `kind`."""

    name: str
    holder: ConfigDict
    key: str
    kind: type

    @property
    def value(self) -> Any:
        """The value."""
        return self.holder[self.key]

    def set(self, value: Any) -> None:
        """Sets the value. Raises `UserError` if the value has another type, or if the field cannot be changed."""
        if self.name == "config.task":
            raise UserError("cannot be changed, because an experiment is for one task; choose another --config")
        try:
            self.holder[self.key] = value
        except (TypeError, ValueError) as error:
            raise UserError(" ".join(str(error).split())) from None

    def parse(self, text: str) -> Any:
        """Parses `text` as a value of the type of the field. Raises `UserError` if it is invalid."""
        if self.kind in _PARSERS:
            return _PARSERS[self.kind](text)
        if self.kind is not tuple:  # such as data.corpus, which is a string or a list
            return _literal(text)
        parsed = _literal(text)
        if isinstance(parsed, str) and text.startswith(("(", "['", '["')):
            raise UserError(f"must be a tuple; write --{self.name}={quoted(self.value)}")
        parsed = tuple(parsed) if isinstance(parsed, tuple | list) else (parsed,)
        if self.value and not all(isinstance(item, type(self.value[0])) for item in parsed):
            raise UserError(
                f"must be a tuple of {type(self.value[0]).__name__}; write --{self.name}={quoted(self.value)}"
            )
        return parsed


def existing_field(config: ConfigDict, path: str) -> Field:
    """Finds the field at `path`, such as "data.dupe_factor". Raises `UserError` with the existing fields."""
    keys = path_keys(path)
    holder, value, name = config, config, "config"
    for key in keys:
        holder = value
        if isinstance(holder, ConfigDict):
            if key not in holder:
                raise UserError(f"{name} has no field {key!r}{suggest(holder, str(key))}")
            name += f".{key}"
        elif isinstance(holder, tuple | list):
            if not (isinstance(key, int) and -len(holder) <= key < len(holder)):
                choice = f"{name}[0]" + (f" to {name}[{len(holder) - 1}]" if len(holder) > 1 else "")
                raise UserError(f"there is no {name}[{key!r}]; {name} has {len(holder)} entries: {choice}")
            name += f"[{key}]"
        else:
            raise UserError(f"{name} has no fields: it is the value {holder!r}")
        value = holder[key]
    if isinstance(value, ConfigDict):
        raise UserError(f"{name} is a section: set one of its fields, {', '.join(value)}")
    if isinstance(value, tuple | list) and any(isinstance(item, ConfigDict) for item in value):
        raise UserError(f"{name} has sections: set a field of one, {name}[0].FIELD: {', '.join(value[0])}")
    if not isinstance(holder, ConfigDict):
        raise UserError(f"set all of {name.rpartition('[')[0]} at once")
    key = str(keys[-1])
    return Field(name, holder, key, holder.get_type(key))


def path_keys(path: str) -> list[str | int]:
    """Returns ["stages", "short", "steps"] for "stages.short.steps". Raises `UserError` if `path` names no field."""
    try:
        return _keys_of(ast.parse(path, mode="eval").body)
    except (SyntaxError, ValueError):
        example = "--config.model.vocab_size=8000"
        raise UserError(f"must name a field, as in {example}") from None


def _keys_of(node: ast.expr) -> list[str | int]:
    """Returns the names in an expression such as stages.short.steps; indices of tuples are integers."""
    match node:
        case ast.Name(name):
            return [name]
        case ast.Attribute(inner, name):
            return [*_keys_of(inner), name]
        case ast.Subscript(inner, index):
            return [*_keys_of(inner), ast.literal_eval(index)]
    raise ValueError(node)


def suggest(names: Iterable[str], wrong: str) -> str:
    """Returns the end of a message: names close to `wrong`, and the other names."""
    close = difflib.get_close_matches(wrong, list(names), cutoff=0.7)
    rest = [name for name in names if name not in close]
    if not close:
        return f"; there are {', '.join(rest)}"
    etc = ", ..." if len(rest) > 10 else ""
    return f"; did you mean {' or '.join(close)}? There are also {', '.join(rest[:10])}{etc}"


def quoted(value: Any) -> str:
    """Returns a value as the text of a flag."""
    return f'"{value}"' if isinstance(value, tuple) else str(value)


def _integer(text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    remedy = ""
    with contextlib.suppress(ValueError):
        remedy = f"; write {int(float(text))}" if float(text).is_integer() else ""
    raise UserError(f"must be a whole number (int){remedy}")


def _float(text: str) -> float:
    try:
        return float(fractions.Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        raise UserError("must be a number (float), such as 0.005, 1e-4 or 1/200") from None


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "t", "1", "false", "f", "0"):
        raise UserError("must be True or False")
    return text.lower() in ("true", "t", "1")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


_PARSERS: dict[type, Callable[[str], Any]] = {str: str, int: _integer, float: _float, bool: _boolean}
