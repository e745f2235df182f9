"""Classification and regression of texts and pairs of texts, shared by GLUE and the user's own tables."""

import ast
import dataclasses
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from bertjax.config import UserError
from bertjax.data.batches.examples import Examples
from bertjax.data.documents.tables import Row, cell, column
from bertjax.interop.pretrained import Pretrained
from bertjax.tasks import metrics, output_layers
from bertjax.tasks.finetuning import Dataset, InputForm, Split
from bertjax.tasks.overlap import seen_in_training
from bertjax.tasks.pairs import encode_pairs
from bertjax.text.tokenizer import Tokenizer

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


INPUTS = InputForm(range(1, 3), 'texts, or pairs as "A ||| B"')


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of the columns with the texts and the label."""

    first: str
    second: str = ""
    label: str = "label"


@dataclasses.dataclass(frozen=True)
class Table:
    """Labelled rows; `suffix` is appended to the names of their metrics."""

    rows: Sequence[Row]
    columns: Columns
    suffix: str = ""


def dataset(
    train: Table,
    dev: Sequence[Table],
    labels: Sequence[str],
    metric_names: Sequence[str],
    tokenizer: Tokenizer,
    max_seq_length: int,
    notes: Sequence[str] = (),
) -> Dataset:
    """Makes a dataset of labelled texts.

    Args:
      labels: the classes; empty for regression.
      metric_names: keys of `METRICS`; the first ranks runs.

    Raises `UserError` with file, line and the expected value for a missing column, an unknown label or a value that is
    not a number.
    """
    notes, splits = list(notes), []
    for table in (train, *dev):
        examples, cut = encode(table, labels, tokenizer, max_seq_length)
        splits.append(examples)
        if cut:
            name = "training" if table is train else f"dev{table.suffix}"
            notes.append(f"{cut} of {len(examples)} {name} examples truncated to {max_seq_length} tokens")
    if labels:
        counts = Counter(splits[0].labels.tolist())
        notes.append(
            f"{len(splits[0])} training examples: " + _named([f"{counts[i]} {label}" for i, label in enumerate(labels)])
        )
    notes += seen_in_training(_texts(train), *((f"dev{table.suffix} texts", _texts(table)) for table in dev))
    dev_splits = [
        Split(examples, _scorer(examples.labels, metric_names, table.suffix, is_class=bool(labels)))
        for table, examples in zip(dev, splits[1:])
    ]
    output_layer = output_layers.classification(len(labels)) if labels else output_layers.regression()
    gold = splits[1].labels
    constants = np.bincount(gold).argsort()[::-1][:2] if labels else ()  # the best guesses, of two classes both
    baseline = max((METRICS[metric_names[0]](gold, np.full(len(gold), i)) for i in constants), default=0.0)
    if metric_names[0] in ("matthews", "spearman"):  # two standard errors of an uninformative prediction
        baseline = 2 / len(gold) ** 0.5
    more_metrics = [name + table.suffix for table in dev for name in metric_names][1:]
    return Dataset(
        output_layer,
        tuple(labels),
        splits[0],
        tuple(dev_splits),
        metric_names[0],
        tuple(notes),
        baseline,
        tuple(more_metrics),
    )


def encode(table: Table, labels: Sequence[str], tokenizer: Tokenizer, max_seq_length: int) -> tuple[Examples, int]:
    """Encodes a table; returns the examples and how many of them were truncated."""
    columns = table.columns
    parts = list(zip(*_texts(table)))
    firsts, seconds = list(parts[0]), list(parts[1]) if columns.second else None
    indices = {label: i for i, label in enumerate(labels)}
    values = np.array([_value(row, columns.label, indices) for row in table.rows])
    input_ids, token_types, cut = encode_pairs(tokenizer, firsts, seconds, max_seq_length)
    return Examples(input_ids, token_types, values), sum(cut)


def predict(source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
    """Yields, per text or pair, `label` and `probabilities` by label, or `score` for regression; `cut` if truncated."""
    firsts, seconds = [text[0] for text in texts], [text[1] for text in texts] if len(texts[0]) == 2 else None
    rows = source.params["classifier"]["dense"]["bias"].shape[0]
    output_layer = output_layers.classification(rows) if rows > 1 else output_layers.regression()
    input_ids, token_types, cut = encode_pairs(source.tokenizer, firsts, seconds, source.max_seq_length)
    names = source.label_names(rows) if rows > 1 else ()
    for logits, was_cut in zip(output_layers.predict(output_layer, source, Examples(input_ids, token_types)), cut):
        more = {"cut": True} if was_cut else {}
        if rows == 1:
            yield {"score": float(logits[0]), **more}
            continue
        yield {
            "label": names[int(logits.argmax())],
            "probabilities": {name: float(p) for name, p in zip(names, metrics.softmax(logits))},
            **more,
        }


def label_of(row: Row, name: str) -> str:
    """Returns the label of a row, without spaces around it. Raises `UserError` if it is missing or a list."""
    value = cell(row, name)
    if isinstance(value, (list, dict)):
        raise _several(row.where, name, value)
    if value is None or not (text := column(row, name).strip()):
        raise UserError(f"{row.where}: {name} is {'null' if value is None else 'empty'}; remove rows without a label")
    return text


def classes(rows: Iterable[Row], name: str) -> tuple[str, ...]:
    """Returns the sorted labels of training data.

    Raises `UserError` for labels that cannot be classes: lists, missing values, two ways to write one label, and many
    different numbers.
    """
    places: dict[str, str] = {}
    for row in rows:
        places.setdefault(label_of(row, name), row.where)
    written: dict = {}
    for label, where in places.items():
        if _is_list(label):
            raise _several(where, name, label)
        if label.lower() in ("nan", "null", "<na>"):
            raise UserError(f"{where}: {name} is {label!r}, which stands for no value; remove rows without a label")
        if (other := written.setdefault(_meaning(label), label)) != label:
            raise UserError(f"{where}: {name} is {label!r}, but {other!r} at {places[other]}; write both in one way")
    if len(written) > MOST_NAMED and all(isinstance(value, float) for value in written):
        if odd := next((label for label, value in zip(places, written) if not value.is_integer()), None):
            raise UserError(
                f"config.data.is_number = False: {name} has {len(written)} different numbers, such as {odd}; set "
                f"config.data.is_number=True to predict numbers"
            )
    return tuple(sorted(places))


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


def _several(where: str, name: str, value) -> UserError:
    kind = "an object" if isinstance(value, dict) else "a list"
    return UserError(
        f"{where}: {name} is {kind}, {str(value)[:60]}: several labels of a text (multi-label) are not supported; "
        f"write one label as text, number or boolean"
    )


def _value(row: Row, name: str, labels: dict[str, int]) -> int | float:
    text = label_of(row, name)
    if labels:
        if text not in labels:
            raise UserError(f"{row.where}: unknown label {text!r}; expected one of {_named(list(labels))}")
        return labels[text]
    if not NUMBER.fullmatch(text) or abs(float(text)) > float(np.finfo(np.float32).max):
        raise UserError(f"{row.where}: {name} is {text!r}, expected a number")
    return float(text)


def _named(labels: Sequence[str]) -> str:
    more = len(labels) - MOST_NAMED
    return ", ".join(labels[:MOST_NAMED]) + (f" and {more} more labels" if more > 0 else "")


def _texts(table: Table) -> Iterator[tuple[str, ...]]:
    """Yields the text, or the pair of texts, of each row."""
    names = [name for name in (table.columns.first, table.columns.second) if name]
    return (tuple(column(row, name) for name in names) for row in table.rows)


def _scorer(labels: np.ndarray, names: Sequence[str], suffix: str, is_class: bool) -> Callable:
    def score(logits: list[np.ndarray]) -> dict[str, float]:
        predictions = np.stack(logits).argmax(-1) if is_class else np.stack(logits)[:, 0]
        return {name + suffix: METRICS[name](labels, predictions) for name in names}

    return score
