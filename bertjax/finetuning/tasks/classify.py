"""Classification or regression of the user's own texts or pairs of texts, from CSV, TSV or JSON lines."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from bertjax.common.errors import UserError
from bertjax.config.limits import require
from bertjax.config.lists import split_at_commas
from bertjax.data.corpus import holdout
from bertjax.data.corpus.tables import Row, Rows, find_table, read_table
from bertjax.finetuning import classification, targets
from bertjax.finetuning.classification import Columns, Table
from bertjax.finetuning.targets import Labels, Number, Target
from bertjax.finetuning.task import Dataset, FineTuningTask, Split
from bertjax.inference.output_layers import OutputLayer
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer


def load(config, tokenizer: Tokenizer) -> Dataset:
    """Loads the tables; the labels are the sorted training labels, or the columns that `data.label` names.

    Raises `UserError` for missing or invalid files.
    """
    columns, data, notes = columns_of(config), config.data, []
    if holdout.is_one_file(data.path):
        rows, _ = read_table(data.path)
        target = _target(data, rows)
        train, dev, note = _divided(rows, target, data)
        notes.append(note)
    else:
        train, dev = (read_table(find_table(data.path, name))[0] for name in ("train", "dev"))
        target = _target(data, train)
    return classification.dataset(
        Table(train, columns),
        [Table(dev, columns)],
        target,
        tokenizer,
        config.max_seq_length,
        notes,
        windows=classification.windows_of(config),
    )


def _divided(rows: Rows, target: Target, data) -> tuple[Rows, Rows, str]:
    """Returns the training rows and the held-out rows of one table, and the line that states the split.

    Raises `UserError` if the table has too few rows.
    """
    is_number = isinstance(target, Number)
    if is_number:
        labels = [()] * len(rows)
    else:
        values = (target.value(row, data.label) for row in rows)
        labels = [np.flatnonzero(value).tolist() if isinstance(target, Labels) else [value] for value in values]
    chosen = holdout.choose(labels, holdout.seed_of(data))
    holdout.require(len(chosen), len(rows), data, "rows", holdout.MIN_FOR_CORRELATION if is_number else 1)
    train, dev = (
        rows.select([number for number in range(len(rows)) if (number in chosen) == is_dev]) for is_dev in (False, True)
    )
    stratified_by = "" if is_number else ", ".join(_label_columns(data))
    return train, dev, holdout.describe(len(dev), len(rows), data, "rows", stratified_by)


def labelled(source: Pretrained, path: str) -> tuple[OutputLayer, Split]:
    """Returns the output layer, and the examples of a table like the training data with how they are scored.

    Of the one file that the run has read, the examples are the held-out ones.
    """
    (rows, _), note, target = read_table(path), "", targets.of_checkpoint(source)
    if holdout.is_file_of_run(path, source.settings.data, source.fingerprints):
        _, rows, note = _divided(rows, target, source.settings.data)
    layer, split = classification.labelled(source, Table(rows, columns_of(source.settings)), target)
    return layer, dataclasses.replace(split, note="\n".join(filter(None, (note, split.note))))


def columns_of(config) -> Columns:
    label, *_ = _label_columns(config.data)  # where there are several, the target knows them
    return Columns(config.data.text, config.data.second_text, label)


def _target(data, train: Sequence[Row]) -> Target:
    """Returns what `config.data` says is predicted."""
    names, written = _label_columns(data), data.get("multi_label", "")
    if data.is_number:
        return targets.Number()
    if len(names) > 1:
        return targets.Labels(names)
    (name,) = names
    if written:
        found = ((label, row.where) for row in train for label in targets.labels_of(row, name, written))
    else:
        found = ((targets.label_of(row, name), row.where) for row in train)
    labels = targets.classes(found, name)
    if len(labels) < 2:
        which = repr(labels[0]) if labels else "empty"
        raise UserError(f"config.data.label = {name!r}: all training labels in {data.path} are {which}")
    if written:
        return targets.Labels(labels, written)
    targets.check_no_numbers(labels, name)
    return targets.Class(labels)


def _label_columns(data) -> tuple[str, ...]:
    return tuple(split_at_commas(data.label))


def validate(config) -> None:
    data, several = config.data, len(_label_columns(config.data)) > 1
    require(len(set(_label_columns(data))) == len(_label_columns(data)), "data.label", data.label, "names one twice")
    written = data.get("multi_label", "")
    columns = "is for one column with all labels; data.label names a column for each, with 0 or 1: leave it out"
    require(not (written and several), "data.multi_label", written, columns)
    combine, stride = data.get("windows", ""), data.get("doc_stride", 1)
    both = "choose mean or max of the windows' logits, or leave it empty to truncate texts"
    require(combine in ("", "mean", "max"), "data.windows", combine, both)
    require(
        stride >= 1, "data.doc_stride", stride, "must be at least 1: tokens from a window's beginning to the next one's"
    )
    number = "one number is predicted, of one column; leave it out for several labels"
    require(not (data.is_number and (written or several)), "data.is_number", True, number)


TASK = FineTuningTask(
    architecture="BertForSequenceClassification",
    inputs=classification.INPUTS,
    load=load,
    predict=classification.predict,
    output_layer=classification.layer_of,
    method="classify",
    columns=lambda config: columns_of(config).texts,
    validate=validate,
    labelled=labelled,
    identity=("data.is_number", "data.multi_label", "data.windows", "data.heldout_seed"),
)
