"""GLUE (Wang et al. 2019): its tasks, their files from gluebenchmark.com or TFDS, and their metrics."""

import dataclasses
import functools

from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.limits import one_of
from bertjax.data.corpus.tables import TFDS, Row, column, read_table, read_tfds
from bertjax.finetuning import classification, targets
from bertjax.finetuning.classification import Columns, Table
from bertjax.finetuning.targets import Class, Number
from bertjax.finetuning.task import Dataset, FineTuningTask, Split
from bertjax.inference.output_layers import OutputLayer
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer

ENTAILMENT = ("entailment", "not_entailment")


@dataclasses.dataclass(frozen=True)
class GlueTask:
    """One task of GLUE: its files, labels and metrics.

    Args:
      folder: its folder in the distribution.
      columns: columns of train.tsv and dev.tsv; `tfds`: columns in TFDS.
      labels: the classes; empty for regression. `tfds_labels`: their names in TFDS, in the same order.
      metrics: GLUE's metrics; the first ranks runs.
      names: column names of files without a header.
      dev: file and TFDS split of each dev set; `suffixes` of the names of their metrics.
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
MNLI = GlueTask(
    "MNLI",
    Columns("sentence1", "sentence2", "gold_label"),
    Columns("premise", "hypothesis"),
    ("contradiction", "entailment", "neutral"),  # run_classifier.MnliProcessor
    ("accuracy",),
    tfds_labels=("contradiction", "entailment", "neutral"),
    dev=(("dev_matched.tsv", "validation_matched"), ("dev_mismatched.tsv", "validation_mismatched")),
    suffixes=("", "_mismatched"),
)

TASKS = {
    "cola": GlueTask(
        "CoLA", SENTENCE, SENTENCE, ("0", "1"), ("matthews", "accuracy"), ("unacceptable", "acceptable"),
        names=("source", "label", "original", "sentence"),
    ),
    "sst2": GlueTask("SST-2", SENTENCE, SENTENCE, ("0", "1"), ("accuracy",), ("negative", "positive")),
    "mrpc": GlueTask(
        "MRPC", Columns("#1 String", "#2 String", "Quality"), PAIR, ("0", "1"), ("f1", "accuracy"),
        ("not_equivalent", "equivalent"),
    ),
    "stsb": GlueTask("STS-B", Columns("sentence1", "sentence2", "score"), PAIR, (), ("spearman", "pearson")),
    "qqp": GlueTask(
        "QQP", Columns("question1", "question2", "is_duplicate"), Columns("question1", "question2"), ("0", "1"),
        ("f1", "accuracy"), ("not_duplicate", "duplicate"),
    ),
    "mnli": MNLI,
    "qnli": GlueTask(
        "QNLI", Columns("question", "sentence"), Columns("question", "sentence"), ENTAILMENT, ("accuracy",), ENTAILMENT
    ),
    "rte": GlueTask("RTE", PAIR, PAIR, ENTAILMENT, ("accuracy",), ENTAILMENT),
    "wnli": GlueTask("WNLI", PAIR, PAIR, ("0", "1"), ("accuracy",), ("not_entailment", "entailment")),
    # The diagnostics have no training data: trains on MNLI, and also evaluates on the diagnostics if they have labels.
    "ax": dataclasses.replace(MNLI, folder="AX"),
}  # fmt: skip
RAGGED = "with a wrong number of columns"
DIAGNOSTICS = "diagnostic-full.tsv"  # has labels, unlike the test file


_read = functools.partial(read_table, quoting=False)  # a quotation mark in these files is one of the text


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads the dataset `config.data.name`. Raises `UserError` for missing or invalid files."""
    task, notes = TASKS[config.data.name], []
    if config.data.path.startswith(TFDS):
        tables = [_tfds(config.data.path, split, task, suffix) for split, suffix in _tfds_splits(task)]
        if task.folder == "AX":
            notes.append(f"no labelled diagnostics in {config.data.path}: evaluates on MNLI's dev sets only")
    else:
        folder = find_folder(config.data.path, "MNLI" if task.folder == "AX" else task.folder)
        files = [("train.tsv", "")] + [(file, suffix) for (file, _), suffix in zip(task.dev, task.suffixes)]
        # The distributed files of QQP have a few lines with missing columns.
        read = [_read(folder / file, task.names, drop_ragged=task.folder == "QQP") for file, _ in files]
        tables = [
            Table(rows, task.columns, suffix, {RAGGED: dropped}) for (rows, dropped), (_, suffix) in zip(read, files)
        ]
        if task.folder == "AX":
            if (folder / DIAGNOSTICS).exists():
                rows, _ = _read(folder / DIAGNOSTICS)
                tables.append(Table(rows, Columns("Premise", "Hypothesis", "Label"), "_diagnostics"))
            else:
                notes.append(f"no {folder / DIAGNOSTICS}: evaluates on MNLI's dev sets only")
    names = task.metrics if task.folder != "AX" else ("accuracy", "matthews")
    target = Class(task.labels, names) if task.labels else Number(metrics=names)
    return classification.dataset(tables[0], tables[1:], target, tokenizer, config.max_seq_length, notes)


def submission(source: Pretrained, path: str) -> tuple[str, str]:
    """Returns GLUE's submission file for the test set in `path`, lines of index and prediction, and a summary."""
    task = TASKS[source.settings.data.name]
    rows, _ = _read(path)
    texts = [tuple(column(row, name) for name in task.columns.texts) for row in rows]
    lines, cut = ["index\tprediction"], 0
    for index, prediction in enumerate(classification.predict(source, texts)):
        cut += "cut" in prediction
        value = prediction["label"] if task.labels else f"{min(5, max(0, prediction['score'])):.3f}"
        lines.append(f"{rows[index].columns.get('index', index)}\t{value}")
    note = f", {cut} of them from texts truncated to {source.max_seq_length} tokens," if cut else ""
    return "\n".join(lines) + "\n", f"{len(rows)} predictions{note}"


def labelled(source: Pretrained, path: str) -> tuple[OutputLayer, Split]:
    """Returns the output layer, and the examples in a file like the task's dev set with how they are scored."""
    task = TASKS[source.settings.data.name]
    rows, dropped = _read(path, task.names, drop_ragged=task.folder == "QQP")
    target = dataclasses.replace(targets.of_checkpoint(source), metrics=task.metrics)
    return classification.labelled(source, Table(rows, task.columns, skipped={RAGGED: dropped}), target)


def find_folder(path: str, name: str) -> epath.Path:
    """Returns the folder with train.tsv: `path/name` or `path`. Raises `UserError` if there is none."""
    candidates = (epath.Path(path) / name, epath.Path(path))
    for folder in candidates:
        if (folder / "train.tsv").exists():
            return folder
    raise UserError(f"config.data.path = {path!r}: no train.tsv in {candidates[0]} or {candidates[1]}")


def _tfds_splits(task: GlueTask) -> list[tuple[str, str]]:
    return [("train", "")] + [(split, suffix) for (_, split), suffix in zip(task.dev, task.suffixes)]


def _tfds(path: str, split: str, task: GlueTask, suffix: str) -> Table:
    ours = dict(zip(task.tfds_labels, task.labels))
    rows = [
        Row(row.columns | {"label": ours.get(label := column(row, "label"), label)}, row.where)
        for row in read_tfds(path, split)
    ]
    return Table(rows, task.tfds, suffix)


TASK = FineTuningTask(
    architecture="BertForSequenceClassification",
    inputs=classification.INPUTS,
    load=load,
    predict=classification.predict,
    output_layer=classification.layer_of,
    method="classify",
    columns=lambda config: TASKS[config.data.name].columns.texts,
    validate=lambda config: one_of(config, "data.name", tuple(TASKS)),
    identity=("data.name",),
    submission=submission,
    labelled=labelled,
)
