"""Checks of the arguments of the public functions."""

import numbers
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from bertjax.common import surrogates
from bertjax.common.errors import UserError
from bertjax.library.types import Parts, Texts


def require_path(name: str, value: Any) -> str:
    """Returns a path as a str. Raises `UserError` for another type."""
    if not isinstance(value, str | os.PathLike):
        raise UserError(f"{name} = {value!r}: must be a str or a path")
    return os.fspath(value)


def plain_texts(texts: Texts) -> list[str]:
    """Returns texts as a list. Raises `UserError` if a text is not a str."""
    listed = _listed(texts)
    for number, text in enumerate(listed):
        if not isinstance(text, str):
            raise UserError(f"texts[{number}] = {text!r}: must be a str")
    return [surrogates.replaced(text) for text in listed]


def parts_of_texts(texts: Parts) -> list[tuple[str, ...]]:
    """Returns texts as tuples of their parts. Raises `UserError` if a part is not a str."""
    listed = _listed(texts)
    divided = [tuple(text) if isinstance(text, list | tuple) else (text,) for text in listed]
    for number, parts in enumerate(divided):
        if not all(isinstance(part, str) for part in parts):
            raise UserError(f"texts[{number}] = {listed[number]!r}: must be a str, or a tuple of str")
    return [tuple(map(surrogates.replaced, parts)) for parts in divided]


def _listed(texts: Any) -> list[Any]:
    """Returns one text, or several, as a list. Raises `UserError` for another type."""
    if isinstance(texts, str):
        return [texts]
    try:
        if isinstance(texts, bytes | bytearray | Mapping):
            raise TypeError
        return list(iter(texts))
    except TypeError:
        raise UserError(f"texts = {texts!r:.60}: must be a str, or a list of str") from None


def check_number(name: str, value: Any, least: float, most: float = np.inf, kinds: Any = (int, np.integer)) -> None:
    """Raises `UserError` unless the value of an argument has a type of `kinds` and is from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        kind = "an integer" if kinds is not numbers.Real else "a number"
        limit = f"from {least} to {most}" if most < np.inf else f"of at least {least}"
        raise UserError(f"{name} = {value!r}: must be {kind} {limit}")
