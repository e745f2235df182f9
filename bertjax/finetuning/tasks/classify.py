"""Classification or regression of the user's own texts or pairs of texts, from CSV, TSV or JSON lines."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.limits import require
from bertjax.config.lists import split_at_commas
from bertjax.data.corpus import holdout
from bertjax.data.corpus.tables import Row, TableRows, check_columns, find_table, read_table
from bertjax.finetuning import classification, label_cells
from bertjax.finetuning.classification import ClassificationTask, Columns, LabelledTexts, Table
from bertjax.finetuning.labels import ClassLabel, LabelType, MultiLabel, NumberLabel, label_type_of
from bertjax.inference.task import TaskData
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer


class Classify(ClassificationTask):
    """Classification or regression of the user's own texts or pairs of texts."""

    identity = ("data.is_number", "data.multi_label", "data.windows", "data.heldout_seed")

    def load(self, config: ConfigDict, tokenizer: Tokenizer) -> TaskData:
        """Reads the tables; the labels are the sorted training labels, or the columns that `data.label` names.

        Raises:
          UserError: for missing or invalid files.
        """
        columns, data, notes = columns_of(config), config.data, []
        train: Sequence[Row]
        dev: Sequence[Row]
        if holdout.is_one_file(data.path):
            rows = _read(config, data.path)
            label_type = _label_type(data, rows)
            train, dev, note = _divided(rows, label_type, data)
            notes.append(note)
        else:
            train, dev = (_read(config, find_table(data.path, name)) for name in ("train", "dev"))
            label_type = _label_type(data, train)
        return classification.make_classification_data(
            Table(train, columns),
            [Table(dev, columns)],
            label_type,
            tokenizer,
            config.max_seq_length,
            notes,
            windows=classification.windows_of(config),
        )

    def text_columns(self, config: ConfigDict) -> tuple[str, ...]:
        """Returns the columns with the texts."""
        return columns_of(config).texts

    def read_labelled(self, source: Pretrained, path: str, **flags: Any) -> LabelledTexts:
        """Returns the rows of a table with the columns of the training data.

        If the run was trained on this table, returns only the held-out rows.
        """
        rows: Sequence[Row]
        (rows, _), note, label_type = read_table(path), "", label_type_of(source)
        if holdout.is_file_of_run(path, source.settings.data, source.fingerprints):
            _, rows, note = _divided(rows, label_type, source.settings.data)
        return self.labelled_texts(source, Table(rows, columns_of(source.settings)), label_type, note)

    def validate(self, config: ConfigDict) -> None:
        """Raises `UserError` for invalid labels or windows."""
        data, names = config.data, _label_columns(config.data)
        separator = data.get("multi_label", "")
        require(len(set(names)) == len(names), "data.label", data.label, "must name each column once")
        columns = "is for one column with all labels, but data.label names a column for each label; leave the field out"
        require(not (separator and len(names) > 1), "data.multi_label", separator, columns)
        combine, stride = data.get("windows", ""), data.get("doc_stride", 1)
        both = "choose mean or max of the windows' logits, or leave the field empty to truncate texts"
        require(combine in ("", "mean", "max"), "data.windows", combine, both)
        tokens = "must be at least 1: the number of tokens between the beginnings of two windows"
        require(stride >= 1, "data.doc_stride", stride, tokens)
        number = "a regression has one column with a number; set False for several labels"
        require(not (data.is_number and (separator or len(names) > 1)), "data.is_number", True, number)


TASK = Classify()


def _read(config: ConfigDict, path: epath.PathLike) -> TableRows:
    """Returns the rows of a table. Raises `UserError` if the first row lacks a column that `config.data` names."""
    rows, _ = read_table(path)
    texts = {f"--config.data.{field}": [name] for field in ("text", "second_text") if (name := config.data[field])}
    check_columns(rows[0], {"--config.data.label": _label_columns(config.data), **texts})
    return rows


def _divided(rows: TableRows, label_type: LabelType, data: ConfigDict) -> tuple[TableRows, TableRows, str]:
    """Returns the training rows and the held-out rows of one table, and the line that states the split.

    Raises:
      UserError: if the table has too few rows.
    """
    is_number = isinstance(label_type, NumberLabel)
    labels: list[Sequence[int]]
    if is_number:
        labels = [()] * len(rows)
    else:
        values = (label_type.value(row, data.label) for row in rows)
        is_multi_label = isinstance(label_type, MultiLabel)
        labels = [np.flatnonzero(value).tolist() if is_multi_label else [value] for value in values]
    chosen = holdout.choose_heldout(labels, holdout.seed_of(data))
    holdout.require_heldout(len(chosen), len(rows), data, "rows", holdout.MIN_FOR_CORRELATION if is_number else 1)
    train, dev = (
        rows.select([number for number in range(len(rows)) if (number in chosen) == is_dev]) for is_dev in (False, True)
    )
    stratified_by = "" if is_number else ", ".join(_label_columns(data))
    return train, dev, holdout.describe_split(len(dev), len(rows), data, "rows", stratified_by)


def columns_of(config: ConfigDict) -> Columns:
    """Returns the columns of a run's tables. If each label has a column, `label` is the first of these columns."""
    label, *_ = _label_columns(config.data)
    return Columns(config.data.text, config.data.second_text, label)


def _label_type(data: ConfigDict, train: Sequence[Row]) -> LabelType:
    """Returns the label type of `config.data`, with the labels of the training rows."""
    names, separator = _label_columns(data), data.get("multi_label", "")
    if data.is_number:
        return NumberLabel()
    if len(names) > 1:
        return MultiLabel(names)
    (name,) = names
    if separator:
        places = ((label, row.where) for row in train for label in label_cells.labels_of(row, name, separator))
    else:
        places = ((label_cells.label_of(row, name), row.where) for row in train)
    labels = label_cells.classes(places, name)
    if len(labels) < 2:
        single = repr(labels[0]) if labels else "empty"
        raise UserError(f"config.data.label = {name!r}: all training labels in {data.path} are {single}")
    if separator:
        return MultiLabel(labels, separator=separator)
    label_cells.check_no_numbers(labels, name)
    return ClassLabel(labels)


def _label_columns(data: ConfigDict) -> tuple[str, ...]:
    return tuple(split_at_commas(data.label))
