"""Classification and regression of texts and pairs of texts, shared by GLUE and the user's own tables."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from bertjax.data.batches.examples import Examples
from bertjax.data.documents.tables import Row, column
from bertjax.interop.pretrained import Pretrained
from bertjax.tasks import output_layers, targets
from bertjax.tasks.finetuning import Dataset, InputForm, Split
from bertjax.tasks.output_layers import OutputLayer
from bertjax.tasks.overlap import seen_in_training
from bertjax.tasks.pairs import encode_pairs
from bertjax.tasks.targets import Target
from bertjax.text.tokenizer import Tokenizer

INPUTS = InputForm(range(1, 3), 'texts, or pairs as "A ||| B"')


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of the columns with the texts and the label."""

    first: str
    second: str = ""
    label: str = "label"

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.first, self.second)))


@dataclasses.dataclass(frozen=True)
class Table:
    """Labelled rows; `suffix` is appended to the names of their metrics."""

    rows: Sequence[Row]
    columns: Columns
    suffix: str = ""


def dataset(
    train: Table,
    dev: Sequence[Table],
    target: Target,
    tokenizer: Tokenizer,
    max_seq_length: int,
    notes: Sequence[str] = (),
) -> Dataset:
    """Makes a dataset of labelled texts.

    Raises `UserError` with file, line and the expected value for a missing column, an unknown label or a value that is
    not a number.
    """
    notes, splits = list(notes), []
    for table in (train, *dev):
        examples, cut = encode(table, target, tokenizer, max_seq_length)
        splits.append(examples)
        if cut:
            name = "training" if table is train else f"dev{table.suffix}"
            notes.append(f"{cut} of {len(examples)} {name} examples truncated to {max_seq_length} tokens")
    if counts := target.counts(splits[0].labels):
        notes.append(f"{len(splits[0])} training examples: {counts}")
    notes += seen_in_training(_texts(train), *((f"dev{table.suffix} texts", _texts(table)) for table in dev))
    dev_splits = tuple(split(target, examples, table.suffix) for table, examples in zip(dev, splits[1:]))
    more_metrics = [name + table.suffix for table in dev for name in target.metrics][1:]
    return Dataset(
        target.output_layer,
        target.labels,
        splits[0],
        dev_splits,
        target.metrics[0],
        tuple(notes),
        target.baseline(splits[1].labels),
        tuple(more_metrics),
        list(_texts(train)),
    )


def split(target: Target, examples: Examples, suffix: str = "") -> Split:
    """Returns examples with how they are scored; `suffix` is appended to the names of their metrics."""

    def score(logits: list[np.ndarray]) -> dict[str, float]:
        return {name + suffix: value for name, value in target.score(examples.labels, np.stack(logits)).items()}

    return Split(examples, score, lambda logits: target.decide(examples.labels, np.stack(logits)))


def labelled(source: Pretrained, table: Table, target: Target) -> tuple[OutputLayer, Split]:
    """Returns the output layer of a checkpoint, and the examples of a table with how they are scored."""
    examples, _ = encode(table, target, source.tokenizer, source.max_seq_length)
    return target.output_layer, split(target, examples)


def encode(table: Table, target: Target, tokenizer: Tokenizer, max_seq_length: int) -> tuple[Examples, int]:
    """Encodes a table; returns the examples and how many of them were truncated."""
    columns = table.columns
    parts = list(zip(*_texts(table)))
    firsts, seconds = list(parts[0]), list(parts[1]) if columns.second else None
    values = np.array([target.value(row, columns.label) for row in table.rows])
    input_ids, token_types, cut = encode_pairs(tokenizer, firsts, seconds, max_seq_length)
    return Examples(input_ids, token_types, values), sum(cut)


def predict(source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
    """Yields, per text or pair, what is predicted of it, and `cut` if truncated.

    That is `label` and `probabilities` by label, `score` for regression, or `labels` and `probabilities` by label.
    """
    firsts, seconds = [text[0] for text in texts], [text[1] for text in texts] if len(texts[0]) == 2 else None
    target = targets.of_checkpoint(source)
    input_ids, token_types, cut = encode_pairs(source.tokenizer, firsts, seconds, source.max_seq_length)
    examples = Examples(input_ids, token_types)
    for logits, was_cut in zip(output_layers.predict(target.output_layer, source, examples), cut):
        yield {**target.describe(logits), **({"cut": True} if was_cut else {})}


def _texts(table: Table) -> Iterator[tuple[str, ...]]:
    """Yields the text, or the pair of texts, of each row."""
    return (tuple(column(row, name) for name in table.columns.texts) for row in table.rows)
