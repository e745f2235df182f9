"""Predicts of the texts in a table, row by row in bounded memory, and adds what is predicted as columns."""

import io
import itertools
from collections.abc import Iterator, Sequence

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import replacing
from bertjax.data.corpus.tables import TableWriter, column, rows_of
from bertjax.inference.task import FineTuningTask
from bertjax.interop.pretrained import Pretrained

ROWS_AT_ONCE = 1024
PREDICTED = "predicted"  # name of the column that is added, or what the names of those begin with


def text_columns(task: FineTuningTask, source: Pretrained, text: str, second_text: str) -> tuple[str, ...]:
    """Returns the columns with the parts of a text: those given, or else those that the run was trained on, or "text".

    Raises `UserError` if a text of the task has another number of parts.
    """
    if second_text and not text:
        raise UserError(f"--second_text={second_text}: name the column of the first text as well, with --text")
    known = task.text_columns(source.settings) if source.settings.get("task") else ()
    names = (text, second_text) if second_text else (text,) if text else known or ("text",)
    is_half = len(known) == 2 and len(names) == 1
    if len(names) not in task.inputs.parts or is_half:
        raise UserError(
            f"--text={','.join(names)}: this checkpoint expects {task.inputs.usage}; name the columns of a table with "
            f"--text and --second_text"
        )
    return names


def predicted(
    task: FineTuningTask, source: Pretrained, path: epath.PathLike, names: Sequence[str]
) -> Iterator[tuple[dict, dict, str]]:
    """Yields the columns of each row of a table, what is predicted of the texts in `names`, and the row's place."""
    rows = rows_of(path)
    while some := list(itertools.islice(rows, ROWS_AT_ONCE)):
        for name in names:
            if name not in some[0].columns:
                has = ", ".join(some[0].columns)
                raise UserError(f"{some[0].where}: no column {name!r}; name that of the texts with --text, of {has}")
        texts = [tuple(column(row, name) for name in names) for row in some]
        for row, result in zip(some, task.predict(source, texts)):
            yield row.columns, result, row.where


def with_columns(columns: dict, result: dict, where: str) -> dict:
    """Returns the columns of a row with a column of what is predicted. Raises `UserError` if there is one."""
    return _joined(columns, {PREDICTED: result}, where)


def write(
    path: epath.PathLike, task: FineTuningTask, source: Pretrained, table: epath.PathLike, names: Sequence[str]
) -> str:
    """Writes a table with what is predicted of its texts; returns a line to print.

    In .jsonl, that is one more column, an object; else one for each of its values, named as by pandas' json_normalize.
    Raises `UserError` for a name that the table has already.
    """
    path, count, cut = epath.Path(path), 0, 0
    with replacing(path) as partial, partial.open("wb") as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        writer = TableWriter(path, text)
        for columns, result, where in predicted(task, source, table, names):
            count, cut = count + 1, cut + ("cut" in result)
            if path.suffix == ".jsonl":
                writer.write(with_columns(columns, result, where), where)
            else:  # all rows have the same columns
                flat = dict(_flat(PREDICTED, {name: value for name, value in result.items() if name != "cut"}))
                writer.write(_joined(columns, flat, where), where)
    note = f", {cut} of them of texts truncated to {source.max_seq_length} tokens" if cut else ""
    return f"{count} predictions in {path}{note}"


def _joined(columns: dict, more: dict, where: str) -> dict:
    if clash := next((name for name in more if name in columns), None):
        raise UserError(f"{where}: there is a column {clash!r} already, which a prediction would replace; rename it")
    return {**columns, **more}


def _flat(name: str, value) -> Iterator[tuple[str, object]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, part in value.items():
        yield from _flat(f"{name}.{key}", part)
