"""Classification and regression of texts and pairs of texts, shared by GLUE and the user's own tables."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from bertjax.data.corpus.tables import Row, column
from bertjax.data.loading.examples import Examples
from bertjax.finetuning.contamination import seen_in_training
from bertjax.finetuning.encoding import encode_pairs, encode_windows
from bertjax.finetuning.labels import LabelType, label_type_of
from bertjax.finetuning.table_summary import KEEPS_MORE, TableSummary
from bertjax.inference import predictor
from bertjax.inference.heads import Head
from bertjax.inference.task import SEPARATOR, FineTuningTask, InputForm, ReadsLabelledFiles, Split, TaskData
from bertjax.interop.cross_encoder import RERANK, query_prompt_of
from bertjax.interop.pretrained import Pretrained, tokenizer_of
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints import workdir


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of the columns with the texts and the label."""

    first: str
    second: str = ""
    label: str = "label"

    @property
    def texts(self) -> tuple[str, ...]:
        """The names of the columns with texts: one, or two for pairs."""
        return tuple(filter(None, (self.first, self.second)))


@dataclasses.dataclass(frozen=True)
class Windows:
    """The division of long texts into windows. The logits of the windows of a text are combined.

    Attributes:
      combine: "mean" or "max"; "" truncates texts instead.
      stride: the number of tokens from the beginning of a window to the beginning of the next window.
    """

    combine: str = ""
    stride: int = 0

    def combined(self, logits: Sequence[np.ndarray], owners: np.ndarray) -> list[np.ndarray]:
        """Returns the logits of each text.

        Args:
          logits: the logits of each window; the windows of a text follow each other.
          owners: the index of the text of each window.
        """
        texts = np.split(np.stack(logits), np.flatnonzero(np.diff(owners)) + 1)
        return [windows.max(0) if self.combine == "max" else windows.mean(0) for windows in texts]


def windows_of(config: ConfigDict) -> Windows:
    """Returns the windows of the config of a run. Settings of other checkpoint formats have no windows."""
    data = config.get("data", {})
    return Windows(data.get("windows", ""), data.get("doc_stride", 0))


@dataclasses.dataclass(frozen=True)
class Table:
    """The labelled rows of a file.

    Attributes:
      rows: the rows.
      columns: the columns with the texts and the label.
      suffix: the suffix of the names of the metrics, such as "_mismatched".
      skipped: the number of other rows of the file, by reason.
    """

    rows: Sequence[Row]
    columns: Columns
    suffix: str = ""
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def texts(self) -> list[tuple[str, ...]]:
        """Returns the text, or the pair of texts, of each row."""
        return [tuple(column(row, name) for name in self.columns.texts) for row in self.rows]


@dataclasses.dataclass(frozen=True)
class LabelledTexts(Split):
    """The encoded texts of a table with their labels. An example is a text, or a window of a text.

    Attributes:
      table: the table.
      label_type: the type of the labels.
      values: the label of each text.
      owners: the index of the text of each example.
      lost: for each text, the number of tokens that were cut off.
      windows: the division of long texts into windows.
      writes_samples: whether `files` contains a few texts with their labels and predictions.
    """

    table: Table
    label_type: LabelType
    values: np.ndarray
    owners: np.ndarray
    lost: Sequence[int]
    windows: Windows = Windows()
    writes_samples: bool = False

    def decode(self, outputs: list[np.ndarray]) -> np.ndarray:
        """Returns the logits of each text, `[texts, rows of the head]`."""
        return np.stack(self.windows.combined(outputs, self.owners))

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        """Returns the metrics of logits, with the suffix of the table."""
        scores = self.label_type.score(self.values, predictions)
        return {name + self.table.suffix: value for name, value in scores.items()}

    def decide(self, predictions: np.ndarray) -> dict[str, float]:
        """Returns the thresholds that are tuned on these texts."""
        return self.label_type.decide(self.values, predictions)

    def files(self, predictions: np.ndarray) -> dict[str, str]:
        """Returns the file with a few texts, their labels and predictions."""
        if not self.writes_samples:
            return {}
        labels, texts, rows = self.label_type.predictions(predictions, self.values), self.table.texts(), []
        for number in workdir.sample_indices(len(texts)):
            label, predicted = (self.label_type.text(values[number]) for values in (self.values, labels))
            rows.append((SEPARATOR.join(texts[number]), label, predicted))
        return workdir.samples_file(rows)

    def summary(self, name: str, tokenizer: Tokenizer) -> TableSummary:
        """Returns the summary of the table for printing."""
        with_windows = f"{KEEPS_MORE}, and --config.data.windows=mean keeps all in windows"
        return TableSummary(
            name,
            len(self.table.rows),
            self.examples,
            tokenizer,
            skipped=self.table.skipped,
            parts=len(self.table.columns.texts),
            lost=self.lost,
            keeps=KEEPS_MORE if self.windows.combine else with_windows,
        )


def make_classification_data(
    train: Table,
    dev: Sequence[Table],
    label_type: LabelType,
    tokenizer: Tokenizer,
    max_seq_length: int,
    notes: Sequence[str] = (),
    windows: Windows = Windows(),
) -> TaskData:
    """Encodes the tables of a task. With windows, each window is an example with the label of its text.

    Raises:
      UserError: for a missing column, an unknown label or a value that is not a number. The message states the file,
        the line and the expected value.
    """
    notes, splits = list(notes), []
    for table in (train, *dev):
        split = encode_table(table, label_type, tokenizer, max_seq_length, windows)
        splits.append(split)
        name = "training" if table is train else f"dev{table.suffix}"
        notes += split.summary(name, tokenizer).lines(max_seq_length)
        if len(split.examples) > len(table.rows):
            notes.append(f"{len(table.rows)} {name} texts in {len(split.examples)} windows")
    train_split, *dev_splits = splits
    if counts := label_type.counts(train_split.values):
        notes.append(f"{len(train.rows)} training examples: {counts}")
    train_texts = train.texts()
    notes += seen_in_training(train_texts, *((f"dev{table.suffix} texts", table.texts()) for table in dev))
    dev_splits[0] = dataclasses.replace(dev_splits[0], writes_samples=True)
    return TaskData(
        label_type.head,
        label_type.labels,
        train_split.examples,
        tuple(dev_splits),
        label_type.metrics[0],
        tuple(notes),
        label_type.baseline(dev_splits[0].values),
        tuple(name + table.suffix for table in dev for name in label_type.metrics)[1:],
        train_texts if len(train_split.examples) == len(train.rows) else (),
    )


def encode_table(
    table: Table,
    label_type: LabelType,
    tokenizer: Tokenizer,
    max_seq_length: int,
    windows: Windows = Windows(),
    prompt: str = "",
) -> LabelledTexts:
    """Encodes a table. The prompt precedes the first text of each row."""
    values = np.array([label_type.value(row, table.columns.label) for row in table.rows])
    examples, owners, lost = _encode_texts(table.texts(), tokenizer, max_seq_length, windows, prompt=prompt)
    examples = dataclasses.replace(examples, labels=values[owners])
    return LabelledTexts(examples, table, label_type, values, owners, lost, windows)


def _encode_texts(
    texts: Sequence[tuple[str, ...]],
    tokenizer: Tokenizer,
    max_seq_length: int,
    windows: Windows,
    longer_keeps_more: bool = False,
    prompt: str = "",
) -> tuple[Examples, np.ndarray, list[int]]:
    """Encodes texts or pairs, whose first text the prompt precedes.

    Returns:
      The examples, the index of the text of each example, and the number of tokens of each text that were cut off.
    """
    firsts, seconds = [prompt + text[0] for text in texts], [text[1] for text in texts] if len(texts[0]) == 2 else None
    if windows.combine:
        ids, types, owners, lost = encode_windows(tokenizer, firsts, seconds, max_seq_length, windows.stride)
    else:
        ids, types, lost = encode_pairs(tokenizer, firsts, seconds, max_seq_length, longer_keeps_more)
        owners = np.arange(len(texts))
    return Examples(ids, types), owners, lost


class TextLogits(NamedTuple):
    """The logits of texts or pairs.

    Attributes:
      logits: the logits of each text.
      were_cut: whether each text was truncated.
      tokens: the number of tokens of each text after the truncation, with special tokens and all windows.
    """

    logits: list[np.ndarray]
    were_cut: list[bool]
    tokens: list[int]


def compute_logits(source: Pretrained, head: Head, texts: Sequence[tuple[str, ...]]) -> TextLogits:
    """Returns a checkpoint's logits of each text or pair, and the numbers of tokens."""
    windows = windows_of(source.settings)
    # A CrossEncoder is trained on pairs that the tokenizers library truncated; a run of rerank truncates them likewise.
    longer_keeps_more = "activation_fn" in source.settings or source.settings.get("task") == RERANK
    examples, owners, lost = _encode_texts(
        texts,
        tokenizer_of(source),
        source.max_seq_length,
        windows,
        longer_keeps_more,
        query_prompt_of(source.settings),
    )
    logits = windows.combined(predictor.predict(head, source, examples), owners)
    tokens = np.bincount(owners, examples.lengths, len(texts)).astype(int)
    return TextLogits(logits, [count > 0 for count in lost], tokens.tolist())


def logits_of(source: Pretrained, head: Head, texts: Sequence[tuple[str, ...]]) -> tuple[list[np.ndarray], list[bool]]:
    """Returns a checkpoint's logits of each text or pair, and whether the text was truncated."""
    return compute_logits(source, head, texts)[:2]


class ClassificationTask(FineTuningTask, ReadsLabelledFiles):
    """The shared parts of tasks that classify texts or pairs of texts, or predict a number for them."""

    architecture = "BertForSequenceClassification"
    inputs = InputForm(range(1, 3), 'texts, or pairs as "A ||| B"')
    method = "classify"

    def head(self, source: Pretrained) -> Head:
        """Returns the head of a checkpoint."""
        return label_type_of(source).head

    def predict(self, source: Pretrained, texts: Sequence[tuple[str, ...]]) -> Iterator[dict]:
        """Yields the predictions of each text or pair, and `cut` if the text was truncated.

        A prediction has `label` and the `probabilities` of all labels; or `score`, for a regression; or, for
        multi-label classification, `labels` and the `probabilities` of all labels.
        """
        label_type = label_type_of(source)
        for logits, was_cut in zip(*logits_of(source, label_type.head, texts)):
            yield {**label_type.describe(logits), **({"cut": True} if was_cut else {})}

    def labelled_texts(self, source: Pretrained, table: Table, label_type: LabelType, note: str = "") -> LabelledTexts:
        """Returns the encoded texts of a table, for scoring a checkpoint.

        Args:
          source: the checkpoint.
          table: the table.
          label_type: the type of the labels.
          note: a line to print before the summary of the table.
        """
        tokenizer, length = tokenizer_of(source), source.max_seq_length
        settings = source.settings
        split = encode_table(table, label_type, tokenizer, length, windows_of(settings), query_prompt_of(settings))
        summary = split.summary("labelled", tokenizer).lines(length)
        return dataclasses.replace(split, note="\n".join(filter(None, (note, *summary))))
