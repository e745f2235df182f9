"""GLUE (Wang et al. 2019): its tasks, their files from gluebenchmark.com or TFDS, and their metrics."""

import dataclasses
import functools
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.limits import one_of
from bertjax.data.corpus.tables import TFDS, Row, column, read_table, read_tfds
from bertjax.finetuning import classification
from bertjax.finetuning.classification import ClassificationTask, Columns, LabelledTexts, Table
from bertjax.finetuning.labels import ClassLabel, LabelType, NumberLabel, label_type_of
from bertjax.inference.task import HasSubmission, TaskData
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer

ENTAILMENT = ("entailment", "not_entailment")


@dataclasses.dataclass(frozen=True)
class GlueDataset:
    """A dataset of GLUE: its files, labels and metrics.

    Attributes:
      folder: the name of the folder in the distribution.
      columns: the columns of train.tsv and dev.tsv.
      tfds: the columns in TFDS.
      labels: the classes; empty for regression.
      metrics: GLUE's metrics; the first metric ranks runs.
      tfds_labels: the names of `labels` in TFDS, in the same order.
      names: the column names of files without a header.
      dev: the file and the TFDS split of each dev set.
      suffixes: for each dev set, the suffix of the metric names.
    """

    folder: str
    columns: Columns
    tfds: Columns
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    tfds_labels: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    dev: tuple[tuple[str, str], ...] = (("dev.tsv", "validation"),)
    suffixes: tuple[str, ...] = ("",)


SENTENCE, PAIR = Columns("sentence"), Columns("sentence1", "sentence2")
MNLI = GlueDataset(
    "MNLI",
    Columns("sentence1", "sentence2", "gold_label"),
    Columns("premise", "hypothesis"),
    ("contradiction", "entailment", "neutral"),  # run_classifier.MnliProcessor
    ("accuracy",),
    tfds_labels=("contradiction", "entailment", "neutral"),
    dev=(("dev_matched.tsv", "validation_matched"), ("dev_mismatched.tsv", "validation_mismatched")),
    suffixes=("", "_mismatched"),
)

DATASETS = {
    "cola": GlueDataset(
        "CoLA", SENTENCE, SENTENCE, ("0", "1"), ("matthews", "accuracy"), ("unacceptable", "acceptable"),
        names=("source", "label", "original", "sentence"),
    ),
    "sst2": GlueDataset("SST-2", SENTENCE, SENTENCE, ("0", "1"), ("accuracy",), ("negative", "positive")),
    "mrpc": GlueDataset(
        "MRPC", Columns("#1 String", "#2 String", "Quality"), PAIR, ("0", "1"), ("f1", "accuracy"),
        ("not_equivalent", "equivalent"),
    ),
    "stsb": GlueDataset("STS-B", Columns("sentence1", "sentence2", "score"), PAIR, (), ("spearman", "pearson")),
    "qqp": GlueDataset(
        "QQP", Columns("question1", "question2", "is_duplicate"), Columns("question1", "question2"), ("0", "1"),
        ("f1", "accuracy"), ("not_duplicate", "duplicate"),
    ),
    "mnli": MNLI,
    "qnli": GlueDataset(
        "QNLI", Columns("question", "sentence"), Columns("question", "sentence"), ENTAILMENT, ("accuracy",), ENTAILMENT
    ),
    "rte": GlueDataset("RTE", PAIR, PAIR, ENTAILMENT, ("accuracy",), ENTAILMENT),
    "wnli": GlueDataset("WNLI", PAIR, PAIR, ("0", "1"), ("accuracy",), ("not_entailment", "entailment")),
    # The diagnostics (AX) have no training data. AX trains on MNLI, and also evaluates on diagnostics with labels.
    "ax": dataclasses.replace(MNLI, folder="AX"),
}  # fmt: skip
RAGGED = "with a wrong number of columns"
DIAGNOSTICS = "diagnostic-full.tsv"  # has labels, unlike the test file


_read = functools.partial(read_table, quoting=False)  # A quotation mark in these files is part of the text.


class Glue(ClassificationTask, HasSubmission):
    """A dataset of GLUE."""

    identity = ("data.name",)

    def load(self, config: ConfigDict, tokenizer: Tokenizer) -> TaskData:
        """Reads the dataset `config.data.name`. Raises `UserError` for missing or invalid files."""
        dataset, notes = DATASETS[config.data.name], []
        is_ax = dataset.folder == "AX"
        if config.data.path.startswith(TFDS):
            tables = [_read_tfds(config.data.path, split, dataset, suffix) for split, suffix in _tfds_splits(dataset)]
            if is_ax:
                notes.append(f"no labelled diagnostics in {config.data.path}: evaluates on MNLI's dev sets only")
        else:
            folder = find_folder(config.data.path, "MNLI" if is_ax else dataset.folder)
            files = [("train.tsv", ""), *((file, suffix) for (file, _), suffix in zip(dataset.dev, dataset.suffixes))]
            tables = [_read_file(folder / file, dataset, suffix) for file, suffix in files]
            if is_ax and (folder / DIAGNOSTICS).exists():
                rows, _ = _read(folder / DIAGNOSTICS)
                tables.append(Table(rows, Columns("Premise", "Hypothesis", "Label"), "_diagnostics"))
            elif is_ax:
                notes.append(f"no {folder / DIAGNOSTICS}: evaluates on MNLI's dev sets only")
        metrics = ("accuracy", "matthews") if is_ax else dataset.metrics
        label_type: LabelType = ClassLabel(dataset.labels, metrics) if dataset.labels else NumberLabel(metrics=metrics)
        return classification.make_classification_data(
            tables[0], tables[1:], label_type, tokenizer, config.max_seq_length, notes
        )

    def validate(self, config: ConfigDict) -> None:
        """Raises `UserError` for an unknown dataset."""
        one_of(config, "data.name", tuple(DATASETS))

    def text_columns(self, config: ConfigDict) -> tuple[str, ...]:
        """Returns the columns with the texts of the dataset."""
        return DATASETS[config.data.name].columns.texts

    def submission(self, source: Pretrained, path: str) -> tuple[str, str]:
        """Returns the text of GLUE's submission file for the test set in `path`, and a summary.

        Each line of the file has the index of an example and the prediction.
        """
        dataset = DATASETS[source.settings.data.name]
        rows, _ = _read(path)
        lines, cut = ["index\tprediction"], 0
        for index, prediction in enumerate(self.predict(source, Table(rows, dataset.columns).texts())):
            cut += "cut" in prediction
            value = prediction["label"] if dataset.labels else f"{min(5, max(0, prediction['score'])):.3f}"
            lines.append(f"{rows[index].columns.get('index', index)}\t{value}")
        note = f", {cut} of them from texts truncated to {source.max_seq_length} tokens," if cut else ""
        return "\n".join(lines) + "\n", f"{len(rows)} predictions{note}"

    def read_labelled(self, source: Pretrained, path: str, **flags: Any) -> LabelledTexts:
        """Returns the examples in a file that has the format of the dev set of the dataset."""
        dataset = DATASETS[source.settings.data.name]
        label_type = dataclasses.replace(label_type_of(source), metrics=dataset.metrics)
        return self.labelled_texts(source, _read_file(path, dataset), label_type)


TASK = Glue()


def _read_file(path: epath.PathLike, dataset: GlueDataset, suffix: str = "") -> Table:
    """Reads a file of a dataset. The distributed files of QQP have a few lines with missing columns."""
    rows, dropped = _read(path, dataset.names, drop_ragged=dataset.folder == "QQP")
    return Table(rows, dataset.columns, suffix, {RAGGED: dropped})


def find_folder(path: str, name: str) -> epath.Path:
    """Returns the folder with train.tsv: `path/name` or `path`. Raises `UserError` if there is none."""
    candidates = (epath.Path(path) / name, epath.Path(path))
    for folder in candidates:
        if (folder / "train.tsv").exists():
            return folder
    raise UserError(f"config.data.path = {path!r}: no train.tsv in {candidates[0]} or {candidates[1]}")


def _tfds_splits(dataset: GlueDataset) -> list[tuple[str, str]]:
    return [("train", ""), *((split, suffix) for (_, split), suffix in zip(dataset.dev, dataset.suffixes))]


def _read_tfds(path: str, split: str, dataset: GlueDataset, suffix: str) -> Table:
    names = dict(zip(dataset.tfds_labels, dataset.labels))
    rows = [
        Row(row.columns | {"label": names.get(label := column(row, "label"), label)}, row.where)
        for row in read_tfds(path, split)
    ]
    return Table(rows, dataset.tfds, suffix)
