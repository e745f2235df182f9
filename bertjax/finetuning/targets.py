"""What is predicted of a text, or of a pair: a class, a number, or any number of labels.

A target reads the labels of rows, says which output layer learns them and how it is scored, and turns logits into what
`predict` prints.
"""

import ast
import dataclasses
import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from bertjax.common.errors import UserError
from bertjax.data.corpus.tables import Row, cell, column
from bertjax.finetuning import metrics
from bertjax.inference import output_layers
from bertjax.inference.output_layers import OutputLayer
from bertjax.interop.huggingface import REGRESSION
from bertjax.interop.pretrained import Pretrained
from bertjax.interop.sentence_transformers import IDENTITY

# Metrics by name, as in metrics.jsonl: functions of labels and predictions `[examples]`, which are class indices, or
# numbers for the correlations.
METRICS: dict[str, Callable] = {
    "accuracy": metrics.accuracy,
    "f1": metrics.f1,
    "matthews": metrics.matthews,
    "pearson": metrics.pearson,
    "spearman": metrics.spearman,
    "macro_f1": metrics.macro_f1,
}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)  # less than `float` takes
MOST_NAMED = 12  # labels that a message names
THRESHOLD = "threshold"  # probability above which a text has a label, tuned on the dev set
LIST = "list"  # the `data.multi_label` of lists


class Target(Protocol):
    """What is predicted of a text.

    Args:
      labels: names of the rows of the output layer; empty if they have none.
      metrics: names of the metrics; the first ranks runs.
    """

    labels: tuple[str, ...]
    metrics: tuple[str, ...]

    @property
    def output_layer(self) -> OutputLayer: ...

    def value(self, row: Row, name: str) -> Any:
        """Returns the label of a row, whose column is `name`. Raises `UserError` with file and line if it has none."""

    def counts(self, values: np.ndarray) -> str:
        """Says how often the labels occur."""

    def baseline(self, values: np.ndarray) -> float:
        """Returns an upper bound of the first metric of a constant, or uninformative, prediction."""

    def decide(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        """Returns what is tuned on these examples, and then used for others."""

    def predictions(self, values: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Returns what is predicted of examples with these labels, in the form of the labels."""

    def shown(self, value: Any) -> str:
        """Returns a label, or a prediction, as text."""

    def score(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        """Returns the metrics of examples with these labels and logits `[examples, rows]`."""

    def describe(self, logits: np.ndarray) -> dict:
        """Returns what `predict` prints of a text with the logits `[rows]`."""


@dataclasses.dataclass(frozen=True)
class Class:
    """One of several classes."""

    labels: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy", "macro_f1")

    @property
    def output_layer(self) -> OutputLayer:
        return output_layers.classification(len(self.labels))

    def value(self, row: Row, name: str) -> int:
        return _index(row.where, label_of(row, name), self._indices)

    @functools.cached_property
    def _indices(self) -> dict[str, int]:
        return {label: i for i, label in enumerate(self.labels)}

    def counts(self, values: np.ndarray) -> str:
        found = np.bincount(values, minlength=len(self.labels))
        return _named([f"{count} {label}" for count, label in zip(found, self.labels)])

    def baseline(self, values: np.ndarray) -> float:
        if self.metrics[0] == "matthews":
            return _uninformative(values)
        best = np.bincount(values).argsort()[::-1][:2]  # the best guesses, of two classes both
        return max(METRICS[self.metrics[0]](values, np.full(len(values), i)) for i in best)

    def decide(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        return {}

    def score(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        return {name: METRICS[name](values, self.predictions(values, logits)) for name in self.metrics}

    def predictions(self, values: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return logits.argmax(-1)

    def shown(self, value: int) -> str:
        return self.labels[value]

    def describe(self, logits: np.ndarray) -> dict:
        return {
            "label": self.labels[int(logits.argmax())],
            "probabilities": {name: float(p) for name, p in zip(self.labels, metrics.softmax(logits))},
        }


@dataclasses.dataclass(frozen=True)
class Number:
    """A number.

    Args:
      is_probability: whether it is the sigmoid of the logit.
    """

    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("spearman", "pearson")
    is_probability: bool = False

    @property
    def output_layer(self) -> OutputLayer:
        return output_layers.regression()

    def value(self, row: Row, name: str) -> float:
        text = label_of(row, name)
        if not NUMBER.fullmatch(text) or abs(float(text)) > float(np.finfo(np.float32).max):
            raise UserError(f"{row.where}: {name} is {text!r}, expected a number")
        return float(text)

    def counts(self, values: np.ndarray) -> str:
        return ""

    def baseline(self, values: np.ndarray) -> float:
        return _uninformative(values)

    def decide(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        return {}

    def score(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        return {name: METRICS[name](values, self.predictions(values, logits)) for name in self.metrics}

    def predictions(self, values: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return metrics.sigmoid(logits[:, 0]) if self.is_probability else logits[:, 0]

    def shown(self, value: float) -> str:
        return f"{value:.4g}"

    def describe(self, logits: np.ndarray) -> dict:
        return {"score": float(self.predictions(np.empty(0), logits[None])[0])}


@dataclasses.dataclass(frozen=True)
class Labels:
    """Any number of labels (multi-label), none included.

    Args:
      written: the `data.multi_label` of the column with the labels of a row; empty if each label has a column.
      threshold: the probability above which a text has a label; None: the one with the best micro F1 of the examples.
        All labels share the threshold: one threshold gives the best micro F1 if the probabilities are right, and a dev
        set may have few examples of a label.
    """

    labels: tuple[str, ...]
    written: str = ""
    threshold: float | None = None
    metrics: tuple[str, ...] = ("micro_f1", "macro_f1")

    @property
    def output_layer(self) -> OutputLayer:
        return output_layers.multi_label(len(self.labels))

    def value(self, row: Row, name: str) -> np.ndarray:
        if not self.written:
            return np.array([_is_set(row, each) for each in self.labels], np.int32)
        found = np.zeros(len(self.labels), np.int32)
        for label in labels_of(row, name, self.written):
            found[_index(row.where, label, self._indices)] = 1
        return found

    @functools.cached_property
    def _indices(self) -> dict[str, int]:
        return {label: i for i, label in enumerate(self.labels)}

    def counts(self, values: np.ndarray) -> str:
        found = [f"{count} {label}" for count, label in zip(values.sum(0), self.labels)]
        return f"{_named(found)}; {(values.sum(1) == 0).sum()} without a label"

    def baseline(self, values: np.ndarray) -> float:
        commonest = np.sort(values.sum(0))[::-1]
        given = len(values) * np.arange(1, len(commonest) + 1)  # every text gets the commonest labels
        return float((2 * np.cumsum(commonest) / (given + commonest.sum())).max())

    def decide(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        return {THRESHOLD: self._threshold_of(values, logits)}

    def score(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        return metrics.f1_of_labels(values, self.predictions(values, logits))

    def predictions(self, values: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return metrics.sigmoid(logits) > self._threshold_of(values, logits)

    def shown(self, value: np.ndarray) -> str:
        return ", ".join(name for name, is_set in zip(self.labels, value) if is_set) or "none"

    def _threshold_of(self, values: np.ndarray, logits: np.ndarray) -> float:
        return metrics.best_threshold(values, metrics.sigmoid(logits)) if self.threshold is None else self.threshold

    def describe(self, logits: np.ndarray) -> dict:
        chances = {name: float(p) for name, p in zip(self.labels, metrics.sigmoid(logits))}
        return {"labels": [name for name, p in chances.items() if p > self.threshold], "probabilities": chances}


def of_checkpoint(source: Pretrained) -> Target:
    """Returns what a checkpoint predicts. Raises `UserError` if its labels are not those of its output layer.

    One logit is a number as sentence-transformers' CrossEncoder and transformers' pipeline compute it: its sigmoid, but
    of a regression, and where a CrossEncoder names another activation.
    """
    rows = source.params["classifier"]["dense"]["bias"].shape[0]
    if source.is_multi_label:
        written = source.settings.get("data", {}).get("multi_label", "")
        return Labels(source.label_names(rows), written, source.decided.get(THRESHOLD, 0.5))
    if rows > 1:
        return Class(source.label_names(rows))
    activation = source.settings.get("activation_fn")
    is_plain = source.problem_type == REGRESSION if activation is None else activation == IDENTITY
    return Number(is_probability=not is_plain)


def _uninformative(values: np.ndarray) -> float:
    return 2 / len(values) ** 0.5  # two standard errors of the correlation


# Labels as they are written.


def label_of(row: Row, name: str) -> str:
    """Returns the label of a row, without spaces around it. Raises `UserError` if it is missing or a list."""
    value = cell(row, name)
    if isinstance(value, (list, dict)):
        raise _several(row.where, name, value)
    if value is None or not (text := column(row, name).strip()):
        raise UserError(f"{row.where}: {name} is {'null' if value is None else 'empty'}; remove rows without a label")
    return text


def labels_of(row: Row, name: str, written: str) -> list[str]:
    """Returns the labels of a row: a list, or texts between the character `written`; empty text is none.

    Raises `UserError` for what is no list of texts, numbers and booleans, or has a label twice.
    """
    value = cell(row, name)
    if isinstance(value, str):
        value = _read_list(row.where, name, value.strip()) if written == LIST else value.split(written)
        value = [part for part in value if not isinstance(part, str) or part.strip()]
    if not isinstance(value, list):
        kind = "null" if value is None else "an object" if isinstance(value, dict) else repr(value)
        raise UserError(f"{row.where}: {name} is {kind}, expected a list of labels; of a text without any, []")
    found = [column(Row({name: part}, row.where), name).strip() for part in value]
    if twice := next((label for label, count in Counter(found).items() if count > 1), None):
        raise UserError(
            f"{row.where}: {name} has {twice!r} twice, expected the names of a text's labels; 0 or 1 for each label "
            f"needs a column for each, which config.data.label names, separated by commas"
        )
    return found


def classes(places: Iterable[tuple[str, str]], name: str) -> tuple[str, ...]:
    """Returns the sorted labels of training data, given as (label, where) of the column `name`.

    Raises `UserError` for labels that cannot be classes: lists, missing values, and two ways to write one label.
    """
    first: dict[str, str] = {}
    for label, where in places:
        first.setdefault(label, where)
    written: dict = {}
    for label, where in first.items():
        if _is_list(label):
            raise _several(where, name, label)
        if label.lower() in ("nan", "null", "<na>"):
            raise UserError(f"{where}: {name} is {label!r}, which stands for no value; remove rows without a label")
        if (other := written.setdefault(_meaning(label), label)) != label:
            raise UserError(f"{where}: {name} is {label!r}, but {other!r} at {first[other]}; write both in one way")
    return tuple(sorted(first))


def check_no_numbers(labels: Sequence[str], name: str) -> None:
    """Raises `UserError` for classes that are many different numbers."""
    numbers = [label for label in labels if isinstance(_meaning(label), float)]
    if len(labels) > MOST_NAMED and len(numbers) == len(labels):
        if odd := next((label for label in numbers if not _meaning(label).is_integer()), None):
            raise UserError(
                f"config.data.is_number = False: {name} has {len(labels)} different numbers, such as {odd}; set "
                f"config.data.is_number=True to predict numbers"
            )


def _index(where: str, label: str, indices: dict[str, int]) -> int:
    if label not in indices:
        raise UserError(f"{where}: unknown label {label!r}; expected one of {_named(list(indices))}")
    return indices[label]


def _is_set(row: Row, name: str) -> bool:
    text = label_of(row, name)
    if (value := _meaning(text)) not in (0.0, 1.0):
        raise UserError(f"{row.where}: {name} is {text!r}, expected 0 or 1: whether the text has this label")
    return bool(value)


def _meaning(label: str) -> float | str:
    """Returns what is equal for labels that differ only in how they are written: 1, 1.0 and true; composed letters."""
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
    """Returns a list that is written as Python or JSON does; of empty text an empty one."""
    try:
        value = ast.literal_eval(text or "[]")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    # As NumPy writes an array, which Python reads as one text.
    if not isinstance(value, (list, tuple, set)) or re.search(r"""['"]\s+['"]""", text):
        raise UserError(
            f"{where}: {name} is {text[:60]!r}, expected a list such as ['a', 'b']; if a character separates the "
            f"labels, set config.data.multi_label to it"
        )
    return list(value)


def _several(where: str, name: str, value) -> UserError:
    kind = "an object" if isinstance(value, dict) else "a list"
    return UserError(
        f"{where}: {name} is {kind}, {str(value)[:60]}: one label is expected, as text, number or boolean; for texts "
        f"with several labels set config.data.multi_label={LIST}"
    )


def _named(labels: Sequence[str]) -> str:
    more = len(labels) - MOST_NAMED
    return ", ".join(labels[:MOST_NAMED]) + (f" and {more} more labels" if more > 0 else "")
