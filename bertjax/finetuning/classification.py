"""Classification and regression of texts and pairs of texts, shared by GLUE and the user's own tables."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.data.corpus.tables import Row, column
from bertjax.data.loading.examples import Examples
from bertjax.finetuning import targets
from bertjax.finetuning.contamination import seen_in_training
from bertjax.finetuning.encoding import encode_pairs, encode_windows
from bertjax.finetuning.table_summary import KEEPS_MORE, TableSummary
from bertjax.finetuning.targets import Target
from bertjax.finetuning.task import SEPARATOR, Dataset, InputForm, Split
from bertjax.inference import output_layers
from bertjax.inference.output_layers import OutputLayer
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints import workdir

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
class Windows:
    """How texts that are longer than a sequence are read: in windows, whose logits are combined.

    Args:
      combine: "mean" or "max"; "": they are truncated instead.
      stride: tokens from the beginning of a window to that of the next one.
    """

    combine: str = ""
    stride: int = 0

    def combined(self, logits: Sequence[np.ndarray], owners: np.ndarray) -> list[np.ndarray]:
        """Returns the logits of each text from those of its windows, which follow each other."""
        texts = np.split(np.stack(logits), np.flatnonzero(np.diff(owners)) + 1)
        return [each.max(0) if self.combine == "max" else each.mean(0) for each in texts]


def windows_of(config) -> Windows:
    """Returns what the config of a run says of windows; of other formats it is empty."""
    data = config.get("data", {})
    return Windows(data.get("windows", ""), data.get("doc_stride", 0))


@dataclasses.dataclass(frozen=True)
class Table:
    """Labelled rows; `suffix` is appended to the names of their metrics; `skipped` counts the others, by reason."""

    rows: Sequence[Row]
    columns: Columns
    suffix: str = ""
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)


def dataset(
    train: Table,
    dev: Sequence[Table],
    target: Target,
    tokenizer: Tokenizer,
    max_seq_length: int,
    notes: Sequence[str] = (),
    windows: Windows = Windows(),
) -> Dataset:
    """Makes a dataset of labelled texts. With windows, each is an example, with the label of its text.

    Raises `UserError` with file, line and the expected value for a missing column, an unknown label or a value that is
    not a number.
    """
    notes, splits = list(notes), []
    for table in (train, *dev):
        encoded = encode(table, target, tokenizer, max_seq_length, windows)
        splits.append(encoded)
        name = "training" if table is train else f"dev{table.suffix}"
        notes += summary(table, encoded, tokenizer, name, windows).lines(max_seq_length)
        if len(encoded.examples) > len(table.rows):
            notes.append(f"{len(table.rows)} {name} texts in {len(encoded.examples)} windows")
    if counts := target.counts(splits[0].values):
        notes.append(f"{len(train.rows)} training examples: {counts}")
    notes += seen_in_training(_texts(train), *((f"dev{table.suffix} texts", _texts(table)) for table in dev))
    dev_splits = [split(target, encoded, windows, table.suffix) for table, encoded in zip(dev, splits[1:])]
    dev_splits[0] = dataclasses.replace(dev_splits[0], files=_samples(dev[0], target, splits[1]))
    more_metrics = [name + table.suffix for table in dev for name in target.metrics][1:]
    return Dataset(
        target.output_layer,
        target.labels,
        splits[0].examples,
        tuple(dev_splits),
        target.metrics[0],
        tuple(notes),
        target.baseline(splits[1].values),
        tuple(more_metrics),
        list(_texts(train)) if len(splits[0].examples) == len(train.rows) else (),
    )


def summary(table: Table, encoded: "EncodedTable", tokenizer: Tokenizer, name: str, windows: Windows) -> TableSummary:
    """Returns the summary of a table."""
    keeps = KEEPS_MORE if windows.combine else f"{KEEPS_MORE}, and --config.data.windows=mean keeps all in windows"
    return TableSummary(
        name,
        len(table.rows),
        encoded.examples,
        tokenizer,
        skipped=table.skipped,
        parts=len(table.columns.texts),
        lost=encoded.lost,
        keeps=keeps,
    )


class EncodedTable(NamedTuple):
    """The examples of a table, each a text or a window of one.

    Attributes:
      values: the label of each text.
      owners: the number of the text of each example.
      lost: how many tokens of each text were cut off.
    """

    examples: Examples
    values: np.ndarray
    owners: np.ndarray
    lost: Sequence[int]


def _samples(table: Table, target: Target, encoded: EncodedTable) -> Callable[[list[np.ndarray]], dict[str, str]]:
    """Returns the function of a dev set's logits that makes the file with a few predictions."""
    columns = table.columns.texts

    def files(logits: list[np.ndarray]) -> dict[str, str]:
        found, rows = target.predictions(encoded.values, np.stack(logits)), []
        for number in workdir.sample_indices(len(table.rows)):
            text = SEPARATOR.join(column(table.rows[number], name) for name in columns)
            rows.append((text, target.shown(encoded.values[number]), target.shown(found[number])))
        return workdir.samples_file(rows)

    return files


def split(target: Target, encoded: EncodedTable, windows: Windows, suffix: str = "") -> Split:
    """Returns examples with how they are scored; `suffix` is appended to the names of their metrics."""

    def score(logits: list[np.ndarray]) -> dict[str, float]:
        return {name + suffix: value for name, value in target.score(encoded.values, np.stack(logits)).items()}

    return Split(
        encoded.examples,
        score,
        lambda logits: target.decide(encoded.values, np.stack(logits)),
        read=lambda logits: windows.combined(logits, encoded.owners),
    )


def labelled(source: Pretrained, table: Table, target: Target) -> tuple[OutputLayer, Split]:
    """Returns the output layer of a checkpoint, and the examples of a table with how they are scored."""
    windows = windows_of(source.settings)
    encoded = encode(table, target, source.tokenizer, source.max_seq_length, windows)
    note = "\n".join(summary(table, encoded, source.tokenizer, "labelled", windows).lines(source.max_seq_length))
    return target.output_layer, dataclasses.replace(split(target, encoded, windows), note=note)


def encode(
    table: Table, target: Target, tokenizer: Tokenizer, max_seq_length: int, windows: Windows = Windows()
) -> EncodedTable:
    """Encodes a table."""
    values = np.array([target.value(row, table.columns.label) for row in table.rows])
    examples, owners, lost = _encoded(list(_texts(table)), tokenizer, max_seq_length, windows)
    return EncodedTable(dataclasses.replace(examples, labels=values[owners]), values, owners, lost)


def _encoded(
    texts: Sequence[tuple[str, ...]],
    tokenizer: Tokenizer,
    max_seq_length: int,
    windows: Windows,
    longer_keeps_more: bool = False,
) -> tuple[Examples, np.ndarray, list[int]]:
    """Returns the examples of texts or pairs, the number of the text of each, and how many tokens each text loses."""
    firsts, seconds = [text[0] for text in texts], [text[1] for text in texts] if len(texts[0]) == 2 else None
    if windows.combine:
        *arrays, owners, lost = encode_windows(tokenizer, firsts, seconds, max_seq_length, windows.stride)
    else:
        *arrays, lost = encode_pairs(tokenizer, firsts, seconds, max_seq_length, longer_keeps_more)
        owners = np.arange(len(texts))
    return Examples(*arrays), owners, lost


def logits_of(
    source: Pretrained, layer: OutputLayer, texts: Sequence[tuple[str, ...]]
) -> tuple[list[np.ndarray], list[bool]]:
    """Returns a checkpoint's logits of each text or pair, and whether it was truncated."""
    windows = windows_of(source.settings)
    is_cross_encoder = "activation_fn" in source.settings  # the tokenizers library cut its training pairs
    given = source.tokenizer, source.max_seq_length, windows, is_cross_encoder
    examples, owners, lost = _encoded(texts, *given)
    return windows.combined(output_layers.predict(layer, source, examples), owners), [count > 0 for count in lost]


def layer_of(source: Pretrained) -> OutputLayer:
    """Returns the output layer that a checkpoint has."""
    return targets.of_checkpoint(source).output_layer


def predict(source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
    """Yields, per text or pair, what is predicted of it, and `cut` if truncated.

    That is `label` and `probabilities` by label, `score` for regression, or `labels` and `probabilities` by label.
    """
    target = targets.of_checkpoint(source)
    for logits, was_cut in zip(*logits_of(source, target.output_layer, texts)):
        yield {**target.describe(logits), **({"cut": True} if was_cut else {})}


def _texts(table: Table) -> Iterator[tuple[str, ...]]:
    """Yields the text, or the pair of texts, of each row."""
    return (tuple(column(row, name) for name in table.columns.texts) for row in table.rows)
