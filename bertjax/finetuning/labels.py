"""The types of labels of a text, or of a pair of texts: a class, a number, or any number of labels.

A label type reads the labels of rows, has the head that predicts them, and turns logits into scores and predictions.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from bertjax.common.errors import UserError
from bertjax.data.corpus.tables import Row
from bertjax.finetuning import metrics
from bertjax.finetuning.label_cells import NUMBER, index_of, is_set, label_of, labels_of, listed
from bertjax.inference.heads import ClassificationHead, Head, MultiLabelHead, RegressionHead
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
THRESHOLD = "threshold"  # probability above which a text has a label, tuned on the dev set


@dataclasses.dataclass(frozen=True)
class LabelType(abc.ABC):
    """The type of the label of a text.

    Attributes:
      labels: the names of the outputs of the head; empty if the outputs have no names.
      metrics: names of the metrics; the first metric ranks runs.
    """

    labels: tuple[str, ...]
    metrics: tuple[str, ...]

    @property
    @abc.abstractmethod
    def head(self) -> Head:
        """The head that predicts these labels."""

    @abc.abstractmethod
    def value(self, row: Row, name: str) -> Any:
        """Returns the label of a row, from the column `name`. Raises `UserError` with file and line for a bad label."""

    @abc.abstractmethod
    def baseline(self, values: np.ndarray) -> float:
        """Returns an upper bound of the first metric for a prediction that does not depend on the text.

        Args:
          values: the labels of the examples.
        """

    @abc.abstractmethod
    def predictions(self, logits: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        """Returns predicted labels.

        Args:
          logits: `[examples, outputs of the head]`.
          values: the labels of these examples, on which an unset threshold is tuned.
        """

    @abc.abstractmethod
    def text(self, value: Any) -> str:
        """Returns a label, or a predicted label, as text."""

    @abc.abstractmethod
    def describe(self, logits: np.ndarray) -> dict:
        """Returns the JSON object that `predict` prints for a text with the logits `[outputs of the head]`."""

    def counts(self, values: np.ndarray) -> str:
        """Returns the number of examples of each label as text; "" if the labels have no names."""
        return ""

    def decide(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        """Returns the thresholds that are tuned on these examples."""
        return {}

    def score(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        """Returns the metrics of examples with these labels and logits `[examples, outputs of the head]`."""
        predictions = self.predictions(logits, values)
        return {name: METRICS[name](values, predictions) for name in self.metrics}

    @functools.cached_property
    def indices(self) -> dict[str, int]:
        """{label: index of the output of the head}."""
        return {label: i for i, label in enumerate(self.labels)}


@dataclasses.dataclass(frozen=True)
class ClassLabel(LabelType):
    """One of several classes."""

    metrics: tuple[str, ...] = ("accuracy", "macro_f1")

    @property
    def head(self) -> Head:
        """A head with one output per class."""
        return ClassificationHead(len(self.labels))

    def value(self, row: Row, name: str) -> int:
        """Returns the index of a class."""
        return index_of(row.where, label_of(row, name), self.indices)

    def counts(self, values: np.ndarray) -> str:
        """Returns the number of examples of each class."""
        counts = np.bincount(values, minlength=len(self.labels))
        return listed([f"{count} {label}" for count, label in zip(counts, self.labels)])

    def baseline(self, values: np.ndarray) -> float:
        """Returns the score of the best constant prediction; for Matthews' correlation, two standard errors."""
        if self.metrics[0] == "matthews":
            return _uninformative(values)
        best_guesses = np.bincount(values).argsort()[::-1][:2]
        return max(METRICS[self.metrics[0]](values, np.full(len(values), guess)) for guess in best_guesses)

    def predictions(self, logits: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        """Returns the index of the most likely class of each example."""
        return logits.argmax(-1)

    def text(self, value: int) -> str:
        """Returns the name of a class."""
        return self.labels[value]

    def describe(self, logits: np.ndarray) -> dict:
        """Returns the most likely `label`, and the `probabilities` of all labels."""
        return {
            "label": self.labels[int(logits.argmax())],
            "probabilities": {name: float(p) for name, p in zip(self.labels, metrics.softmax(logits))},
        }


@dataclasses.dataclass(frozen=True)
class NumberLabel(LabelType):
    """A number.

    Attributes:
      is_probability: whether the number is the sigmoid of the logit.
    """

    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("spearman", "pearson")
    is_probability: bool = False

    @property
    def head(self) -> Head:
        """A head with one output."""
        return RegressionHead()

    def value(self, row: Row, name: str) -> float:
        """Returns a finite float32 number."""
        text = label_of(row, name)
        if not NUMBER.fullmatch(text) or abs(float(text)) > float(np.finfo(np.float32).max):
            raise UserError(f"{row.where}: {name} is {text!r}, expected a number")
        return float(text)

    def baseline(self, values: np.ndarray) -> float:
        """Returns two standard errors of the correlation."""
        return _uninformative(values)

    def predictions(self, logits: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        """Returns the predicted numbers `[examples]`."""
        return metrics.sigmoid(logits[:, 0]) if self.is_probability else logits[:, 0]

    def text(self, value: float) -> str:
        """Returns a number with four digits."""
        return f"{value:.4g}"

    def describe(self, logits: np.ndarray) -> dict:
        """Returns the `score`."""
        return {"score": float(self.predictions(logits[None])[0])}


@dataclasses.dataclass(frozen=True)
class MultiLabel(LabelType):
    """Any number of labels (multi-label classification), including no label.

    Attributes:
      separator: `config.data.multi_label` of the column with the labels of a row; empty if each label has a column.
      threshold: the probability above which a text has a label. None: the threshold with the best micro F1 on the
        examples. All labels share the threshold, for two reasons: a single threshold gives the best micro F1 if the
        probabilities are calibrated, and a dev set may have too few examples to tune a threshold for each label.
    """

    metrics: tuple[str, ...] = ("micro_f1", "macro_f1")
    separator: str = ""
    threshold: float | None = None

    @property
    def head(self) -> Head:
        """A head with one output per label."""
        return MultiLabelHead(len(self.labels))

    def value(self, row: Row, name: str) -> np.ndarray:
        """Returns 0 or 1 for each label, `[labels]`."""
        if not self.separator:
            return np.array([is_set(row, label) for label in self.labels], np.int32)
        values = np.zeros(len(self.labels), np.int32)
        for label in labels_of(row, name, self.separator):
            values[index_of(row.where, label, self.indices)] = 1
        return values

    def counts(self, values: np.ndarray) -> str:
        """Returns the number of examples of each label, and of examples without a label."""
        counts = [f"{count} {label}" for count, label in zip(values.sum(0), self.labels)]
        return f"{listed(counts)}; {(values.sum(1) == 0).sum()} without a label"

    def baseline(self, values: np.ndarray) -> float:
        """Returns the best micro F1 of a prediction that gives all texts the same labels, the most frequent ones."""
        counts = np.sort(values.sum(0))[::-1]
        predicted = len(values) * np.arange(1, len(counts) + 1)
        return float((2 * np.cumsum(counts) / (predicted + counts.sum())).max())

    def decide(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        """Returns the threshold. If `threshold` is None, tunes the threshold on these examples."""
        return {THRESHOLD: self._threshold_of(logits, values)}

    def score(self, values: np.ndarray, logits: np.ndarray) -> dict[str, float]:
        """Returns the micro and the macro F1."""
        return metrics.f1_of_labels(values, self.predictions(logits, values))

    def predictions(self, logits: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
        """Returns whether each example has each label, booleans `[examples, labels]`."""
        return metrics.sigmoid(logits) > self._threshold_of(logits, values)

    def text(self, value: np.ndarray) -> str:
        """Returns the names of the labels of an example."""
        return ", ".join(name for name, has_label in zip(self.labels, value) if has_label) or "none"

    def describe(self, logits: np.ndarray) -> dict:
        """Returns the `labels` above the threshold, and the `probabilities` of all labels."""
        probabilities = dict(zip(self.labels, metrics.sigmoid(logits).tolist()))
        threshold = self._threshold_of(logits, None)
        return {
            "labels": [name for name, p in probabilities.items() if p > threshold],
            "probabilities": probabilities,
        }

    def _threshold_of(self, logits: np.ndarray, values: np.ndarray | None) -> float:
        if self.threshold is not None:
            return self.threshold
        if values is None:
            raise ValueError("threshold = None: predictions need a threshold, or the labels to tune a threshold on")
        return metrics.best_threshold(values, metrics.sigmoid(logits))


def label_type_of(source: Pretrained) -> LabelType:
    """Returns the label type of a checkpoint with a classifier.

    With one logit, the prediction is a number, as in sentence-transformers' CrossEncoder and in transformers' pipeline.
    The number is the sigmoid of the logit. For a regression and for a CrossEncoder whose activation is the identity,
    the number is the logit.

    Raises:
      UserError: if the number of labels differs from the number of outputs of the head.
    """
    rows = source.params["classifier"]["dense"]["bias"].shape[0]
    if source.is_multi_label:
        separator = source.settings.get("data", {}).get("multi_label", "")
        labels = source.label_names(rows)
        return MultiLabel(labels, separator=separator, threshold=source.decided.get(THRESHOLD, 0.5))
    if rows > 1:
        return ClassLabel(source.label_names(rows))
    activation = source.settings.get("activation_fn")
    is_plain = source.problem_type == REGRESSION if activation is None else activation == IDENTITY
    return NumberLabel(is_probability=not is_plain)


def _uninformative(values: np.ndarray) -> float:
    return 2 / len(values) ** 0.5  # two standard errors of the correlation
