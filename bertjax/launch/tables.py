"""Training data from memory: tables that `bertjax.train(data=...)` writes into the workdir."""

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from bertjax.common import surrogates
from bertjax.common.errors import UserError
from bertjax.common.files import replacing

FOLDER = "data"
SPLITS = ("train", "dev")
EXPECTED = "a pandas or polars DataFrame, a datasets.Dataset, or a list of dicts"


def use_tables(config: ConfigDict, data: Any, workdir: epath.PathLike) -> None:
    """Writes tables to `WORKDIR/data` as JSON lines, and sets the fields of the config that locate the data.

    Args:
      config: the config. The function sets `data.path`, or in pre-training `data.corpus`.
      data: a table, or {"train": table, "dev": table}. A table is a pandas or polars DataFrame, a `datasets.Dataset`,
        or an iterable of dicts. Without a dev table, a tenth of the rows is held out.
      workdir: the folder of the run.

    Raises:
      UserError: if the data is not a table, if a table is empty, if pre-training has a dev table, or if the workdir has
        a run on other data. The files of the workdir then do not change.
    """
    tables = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in tables or not tables.keys() <= set(SPLITS):
        raise UserError(f"data = {list(tables)}: expected a table, or a dict with the tables train and dev")
    workdir = epath.Path(workdir)
    folder, is_pretraining = workdir / FOLDER, "corpus" in config.data
    if is_pretraining and len(tables) > 1:
        raise UserError("data = ['train', 'dev']: pre-training holds out documents itself; give one table")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.jsonl" for name in tables}
    with contextlib.ExitStack() as files:  # replaces the files only if all tables are valid
        partials = {name: files.enter_context(replacing(path)) for name, path in paths.items()}
        for name, partial in partials.items():
            write_table(tables[name], partial)
        for name, path in paths.items():
            content = partials[name].read_bytes()
            if not content.strip():
                raise UserError(f"data: the table {name} has no rows; give at least one row")
            if (workdir / "config.json").exists() and path.exists() and path.read_bytes() != content:
                raise UserError(f"data: {workdir} has a run on other rows of {name}; choose another workdir")
    if is_pretraining:
        config.data.corpus = str(paths["train"])
    else:
        config.data.path = str(folder if len(tables) > 1 else paths["train"])


def write_table(table: Any, path: epath.Path) -> None:
    """Writes a table as JSON lines with the writer of its library. Raises `UserError` for another object."""
    if hasattr(table, "write_ndjson"):  # polars
        table.write_ndjson(str(path))
    elif hasattr(table, "column_names") and hasattr(table, "to_json"):  # datasets
        table.to_json(str(path), double_precision=15)
    elif hasattr(table, "columns") and hasattr(table, "to_json"):  # pandas
        table.to_json(str(path), orient="records", lines=True, double_precision=15)
    else:
        _write_rows(table, path)


def _write_rows(rows: Iterable[Mapping[str, Any]], path: epath.Path) -> None:
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise UserError(f"data = {rows!r:.60}: expected {EXPECTED}")
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UserError(f"data[{number}] = {row!r:.60}: expected a dict, because data is {EXPECTED}")
            try:
                line = json.dumps({name: _cell(value) for name, value in row.items()}, ensure_ascii=False)
            except TypeError as error:
                raise UserError(f"data[{number}] = {row!r:.60}: {error}; use text, numbers and lists") from None
            file.write(surrogates.replaced(line) + "\n")


def _cell(value: Any) -> Any:
    """Returns the value of a cell, with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, list | tuple):
        return [_cell(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
