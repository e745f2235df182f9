"""Reads labels as users write them in the cells of a table."""

import ast
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertjax.common.errors import UserError
from bertjax.data.corpus.tables import Row, cell, column

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)  # `float` accepts more
MAX_LISTED = 12  # the largest number of labels in a message
LIST = "list"  # the value of `data.multi_label` for a column of lists


def label_of(row: Row, name: str) -> str:
    """Returns the label of a row, without surrounding spaces. Raises `UserError` if the cell is empty or a list."""
    value = cell(row, name)
    if isinstance(value, (list, dict)):
        raise _several(row.where, name, value)
    if value is None or not (text := column(row, name).strip()):
        raise UserError(f"{row.where}: {name} is {'null' if value is None else 'empty'}; remove rows without a label")
    return text


def labels_of(row: Row, name: str, separator: str) -> list[str]:
    """Returns the labels of a row.

    Args:
      row: the row.
      name: the name of the column.
      separator: `config.data.multi_label`: the character between the labels, or "list" for a written list. An empty
        cell has no labels.

    Raises:
      UserError: if the cell is not a list of texts, numbers and booleans, or repeats a label.
    """
    value = cell(row, name)
    if isinstance(value, str):
        value = _read_list(row.where, name, value.strip()) if separator == LIST else value.split(separator)
        value = [part for part in value if not isinstance(part, str) or part.strip()]
    if not isinstance(value, list):
        kind = "null" if value is None else "an object" if isinstance(value, dict) else repr(value)
        raise UserError(f"{row.where}: {name} is {kind}, expected a list of labels; write [] for a text without labels")
    labels = [column(Row({name: part}, row.where), name).strip() for part in value]
    if twice := next((label for label, count in Counter(labels).items() if count > 1), None):
        raise UserError(
            f"{row.where}: {name} has {twice!r} twice, expected a list of distinct labels; for a column with 0 or "
            f"1 for each label, name all columns in config.data.label, separated by commas"
        )
    return labels


def classes(places: Iterable[tuple[str, str]], name: str) -> tuple[str, ...]:
    """Returns the sorted labels of training data.

    Args:
      places: the label of each row, and FILE:LINE of the row.
      name: the name of the column.

    Raises:
      UserError: for a label that cannot be a class: a list, a missing value, or a second spelling of a label.
    """
    first: dict[str, str] = {}
    for label, where in places:
        first.setdefault(label, where)
    written: dict = {}
    for label, where in first.items():
        if _is_list(label):
            raise _several(where, name, label)
        if label.lower() in ("nan", "null", "<na>"):
            raise UserError(f"{where}: {name} is {label!r}, which is a missing value; remove rows without a label")
        if (other := written.setdefault(_meaning(label), label)) != label:
            raise UserError(f"{where}: {name} is {label!r}, but {other!r} at {first[other]}; use one spelling")
    return tuple(sorted(first))


def check_no_numbers(labels: Sequence[str], name: str) -> None:
    """Raises `UserError` if the classes are more than `MAX_LISTED` numbers and not all of them are integers."""
    numbers = {label: number for label in labels if isinstance(number := _meaning(label), float)}
    if len(labels) > MAX_LISTED and len(numbers) == len(labels):
        if odd := next((label for label, number in numbers.items() if not number.is_integer()), None):
            raise UserError(
                f"config.data.is_number = False: {name} has {len(labels)} different numbers, such as {odd}; set "
                f"config.data.is_number=True to predict numbers"
            )


def index_of(where: str, label: str, indices: Mapping[str, int]) -> int:
    """Returns the index of a label. Raises `UserError` with `where`, FILE:LINE, for an unknown label."""
    if label not in indices:
        raise UserError(f"{where}: unknown label {label!r}; expected one of {listed(list(indices))}")
    return indices[label]


def is_set(row: Row, name: str) -> bool:
    """Returns whether the column of a label contains 1. Raises `UserError` unless the column contains 0 or 1."""
    text = label_of(row, name)
    if (value := _meaning(text)) not in (0.0, 1.0):
        raise UserError(f"{row.where}: {name} is {text!r}, expected 0 or 1: whether the text has this label")
    return bool(value)


def _meaning(label: str) -> float | str:
    """Returns the same value for all spellings of a label: 1, 1.0 and true; composed and decomposed letters."""
    if NUMBER.fullmatch(label):
        return float(label)
    truth = {"true": 1.0, "false": 0.0}
    text = re.sub("[\u200b\ufeff]", "", unicodedata.normalize("NFKC", label))
    return truth.get(text.lower(), text)


def _is_list(label: str) -> bool:
    """Returns whether text is a list, set or object as Python, JSON or NumPy writes it."""
    if (label[0], label[-1]) not in (("[", "]"), ("{", "}"), ("(", ")")):
        return False
    if re.fullmatch(r"\[[\d\s.]*\]", label):
        return True
    try:
        return isinstance(ast.literal_eval(label), (list, tuple, set, dict))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _read_list(where: str, name: str, text: str) -> list:
    """Returns a list in the notation of Python or JSON; an empty text is an empty list."""
    try:
        value = ast.literal_eval(text or "[]")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    # Python reads the notation of a NumPy array, ['a' 'b'], as one text.
    if not isinstance(value, (list, tuple, set)) or re.search(r"""['"]\s+['"]""", text):
        raise UserError(
            f"{where}: {name} is {text[:60]!r}, expected a list such as ['a', 'b']; if a character separates the "
            f"labels, set config.data.multi_label to this character"
        )
    return list(value)


def _several(where: str, name: str, value: Any) -> UserError:
    kind = "an object" if isinstance(value, dict) else "a list"
    return UserError(
        f"{where}: {name} is {kind}, {str(value)[:60]}: one label is expected, as text, number or boolean; for texts "
        f"with several labels set config.data.multi_label={LIST}"
    )


def listed(labels: Sequence[str]) -> str:
    """Returns labels as text: the first `MAX_LISTED` labels, and the number of further labels."""
    more = len(labels) - MAX_LISTED
    return ", ".join(labels[:MAX_LISTED]) + (f" and {more} more labels" if more > 0 else "")
