"""Classification and regression of texts and pairs of texts, shared by GLUE and the user's own tables."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bertjax.config import UserError
from bertjax.data.examples import Examples
from bertjax.data.tables import Row, column
from bertjax.interop.pretrained import Pretrained
from bertjax.tasks import metrics, objectives
from bertjax.tasks.finetuning import Dataset, InputForm, Split
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
            f"{len(splits[0])} training examples: "
            + ", ".join(f"{counts[i]} {label}" for i, label in enumerate(labels[:12]))
            + (f" and {len(labels) - 12} more labels" if len(labels) > 12 else "")
        )
    dev_splits = [
        Split(examples, _scorer(examples.labels, metric_names, table.suffix, is_class=bool(labels)))
        for table, examples in zip(dev, splits[1:])
    ]
    objective = objectives.classification(len(labels)) if labels else objectives.regression()
    gold = splits[1].labels
    baseline = max((METRICS[metric_names[0]](gold, np.full(len(gold), i)) for i in range(len(labels))), default=0.0)
    if metric_names[0] in ("matthews", "spearman"):  # two standard errors of an uninformative prediction
        baseline = 2 / len(gold) ** 0.5
    more_metrics = [name + table.suffix for table in dev for name in metric_names][1:]
    return Dataset(
        objective,
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
    firsts = [column(row, columns.first) for row in table.rows]
    seconds = [column(row, columns.second) for row in table.rows] if columns.second else None
    values = np.array([_value(row, columns.label, labels) for row in table.rows])
    input_ids, token_types, cut = encode_pairs(tokenizer, firsts, seconds, max_seq_length)
    return Examples(input_ids, token_types, values), sum(cut)


def predict(source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
    """Yields, per text or pair, `label` and `probabilities` by label, or `score` for regression; `cut` if truncated."""
    firsts, seconds = [text[0] for text in texts], [text[1] for text in texts] if len(texts[0]) == 2 else None
    rows = source.params["classifier"]["dense"]["bias"].shape[0]
    objective = objectives.classification(rows) if rows > 1 else objectives.regression()
    input_ids, token_types, cut = encode_pairs(source.tokenizer, firsts, seconds, source.max_seq_length)
    names = source.labels or [f"LABEL_{i}" for i in range(rows)]
    for logits, was_cut in zip(objectives.predict(objective, source, Examples(input_ids, token_types)), cut):
        more = {"cut": True} if was_cut else {}
        if rows == 1:
            yield {"score": float(logits[0]), **more}
            continue
        yield {
            "label": names[int(logits.argmax())],
            "probabilities": {name: float(p) for name, p in zip(names, metrics.softmax(logits))},
            **more,
        }


def _value(row: Row, name: str, labels: Sequence[str]) -> int | float:
    text = column(row, name)
    if labels:
        if text not in labels:
            raise UserError(f"{row.where}: unknown label {text!r}; expected one of {', '.join(labels)}")
        return labels.index(text)
    try:
        number = float(text)
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise UserError(f"{row.where}: {name} is {text!r}, expected a number")
    return number


def _scorer(labels: np.ndarray, names: Sequence[str], suffix: str, is_class: bool) -> Callable:
    def score(logits: list[np.ndarray]) -> dict[str, float]:
        predictions = np.stack(logits).argmax(-1) if is_class else np.stack(logits)[:, 0]
        return {name + suffix: METRICS[name](labels, predictions) for name in names}

    return score
