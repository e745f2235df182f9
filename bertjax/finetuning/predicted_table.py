"""Predictions for the texts of a table, as new columns. The memory use does not depend on the number of rows."""

import io
import itertools
from collections.abc import Iterator, Sequence

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import replacing
from bertjax.data.corpus.tables import TableWriter, column, rows_of
from bertjax.inference.abilities import task_of
from bertjax.inference.task import FineTuningTask
from bertjax.interop.pretrained import Pretrained

ROWS_AT_ONCE = 1024
PREDICTED = "predicted"  # the name of the new column, or the prefix of the names of the new columns


def text_columns(task: FineTuningTask, source: Pretrained, text: str, second_text: str) -> tuple[str, ...]:
    """Returns the names of the columns with the parts of a text.

    Args:
      task: the task of the checkpoint.
      source: the checkpoint.
      text: the flag --text; "" for the columns of the training data of the run, or else the column "text".
      second_text: the flag --second_text.

    Raises:
      UserError: if the texts of the task have another number of parts.
    """
    if second_text and not text:
        raise UserError(f"--second_text={second_text}: name the column of the first text as well, with --text")
    trained = task.text_columns(source.settings) if source.settings.get("task") else ()
    names = (text, second_text) if second_text else (text,) if text else trained or ("text",)
    is_half = len(trained) == 2 and len(names) == 1
    if len(names) not in task.inputs.parts or is_half:
        raise UserError(
            f"--text={','.join(names)}: this checkpoint expects {task.inputs.usage}; name the columns of a table with "
            f"--text and --second_text"
        )
    return names


def predict_table(source: Pretrained, path: epath.PathLike, text: str = "", second_text: str = "") -> Iterator[dict]:
    """Yields the columns of each row of a table, with the prediction in the column `predicted`.

    Args:
      source: the checkpoint.
      path: the table.
      text: the column of the texts, see `text_columns`.
      second_text: the column of the second texts of pairs.

    Raises:
      UserError: for a checkpoint that is not fine-tuned, a missing column, or a table that has a column `predicted`.
    """
    task = _task(source, path)
    names = text_columns(task, source, text, second_text)
    for columns, result, where in _predicted_rows(task, source, path, names):
        yield _joined(columns, {PREDICTED: result}, where)


def write_predictions(
    output: epath.PathLike, source: Pretrained, table: epath.PathLike, text: str = "", second_text: str = ""
) -> str:
    """Writes a table with predictions for the texts, and returns a line to print.

    A .jsonl file has one new field, which contains the prediction as an object. Other formats have a new column for
    each value of the prediction, with the names of `pandas.json_normalize`.

    Args:
      output: the file to write.
      source: the checkpoint.
      table: the table with the texts.
      text: the column of the texts, see `text_columns`.
      second_text: the column of the second texts of pairs.

    Raises:
      UserError: as `predict_table` does.
    """
    task = _task(source, table)
    predicted_rows = _predicted_rows(task, source, table, text_columns(task, source, text, second_text))
    path, count, cut = epath.Path(output), 0, 0
    with replacing(path) as partial, partial.open("wb") as file, io.TextIOWrapper(file, "utf-8", newline="") as stream:
        writer = TableWriter(path, stream)
        for columns, result, where in predicted_rows:
            count, cut = count + 1, cut + ("cut" in result)
            values: dict = {PREDICTED: result}
            if path.suffix != ".jsonl":  # All rows need the same columns, so that `cut` is left out.
                values = dict(_flat(PREDICTED, {name: value for name, value in result.items() if name != "cut"}))
            writer.write(_joined(columns, values, where), where)
    note = f", {cut} of them for texts truncated to {source.max_seq_length} tokens" if cut else ""
    return f"{count} predictions in {path}{note}"


def _task(source: Pretrained, path: epath.PathLike) -> FineTuningTask:
    if (task := task_of(source)) is None:
        raise UserError(f"--input={path}: a table is for a fine-tuned checkpoint; write the texts to a .txt")
    return task


def _predicted_rows(
    task: FineTuningTask, source: Pretrained, path: epath.PathLike, names: Sequence[str]
) -> Iterator[tuple[dict, dict, str]]:
    """Yields the columns of each row, the prediction for the texts in `names`, and FILE:LINE of the row."""
    all_rows = rows_of(path)
    while rows := list(itertools.islice(all_rows, ROWS_AT_ONCE)):
        for name in names:
            if name not in rows[0].columns:
                columns = ", ".join(rows[0].columns)
                raise UserError(
                    f"{rows[0].where}: no column {name!r}; set --text to the column of the texts, one of {columns}"
                )
        texts = [tuple(column(row, name) for name in names) for row in rows]
        for row, result in zip(rows, task.predict(source, texts)):
            yield row.columns, result, row.where


def _joined(columns: dict, more: dict, where: str) -> dict:
    if clash := next((name for name in more if name in columns), None):
        raise UserError(
            f"{where}: the table has a column {clash!r}, which a prediction would replace; rename the column"
        )
    return {**columns, **more}


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, part in value.items():
        yield from _flat(f"{name}.{key}", part)
