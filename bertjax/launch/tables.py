"""Training data from memory: tables that `bertjax.train(data=...)` writes into the workdir."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import replacing

FOLDER = "data"
SPLITS = ("train", "dev")


def use_tables(config: ConfigDict, data: Any, workdir: epath.PathLike) -> None:
    """Writes tables to `WORKDIR/data` as JSON lines, and sets the fields of the config that locate the data.

    Args:
      config: the config to change: `data.path`, or `data.corpus` of pre-training.
      data: a table, or {"train": table, "dev": table}. A table is a pandas or polars DataFrame, a `datasets.Dataset`,
        or an iterable of dicts. Without a dev table, a tenth of the rows is held out.
      workdir: the folder of the run.

    Raises:
      UserError: if the data is not a table, or if pre-training has a dev table.
    """
    tables = dict(data) if isinstance(data, Mapping) else {"train": data}
    if "train" not in tables or not tables.keys() <= set(SPLITS):
        raise UserError(f"data = {list(tables)}: expected a table, or a dict with the tables train and dev")
    folder = epath.Path(workdir) / FOLDER
    is_pretraining = "corpus" in config.data
    if is_pretraining and len(tables) > 1:
        raise UserError("data = ['train', 'dev']: pre-training holds out documents itself; give one table")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.jsonl" for name in tables}
    for name, table in tables.items():
        with replacing(paths[name]) as partial:
            write_table(table, partial)
    if is_pretraining:
        config.data.corpus = str(paths["train"])
    else:
        config.data.path = str(folder if len(tables) > 1 else paths["train"])


def write_table(table: Any, path: epath.Path) -> None:
    """Writes a table as JSON lines with the writer of its library. Raises `UserError` for another object."""
    if hasattr(table, "write_ndjson"):  # polars
        table.write_ndjson(str(path))
    elif hasattr(table, "column_names") and hasattr(table, "to_json"):  # datasets
        table.to_json(str(path), force_ascii=False)
    elif hasattr(table, "iloc") and hasattr(table, "to_json"):  # pandas
        table.to_json(str(path), orient="records", lines=True, force_ascii=False)
    else:
        _write_rows(table, path)


def _write_rows(rows: Iterable[Mapping[str, Any]], path: epath.Path) -> None:
    expected = "a pandas or polars DataFrame, a datasets.Dataset, or a list of dicts"
    if isinstance(rows, str | bytes) or not isinstance(rows, Iterable):
        raise UserError(f"data = {rows!r:.60}: expected {expected}")
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UserError(f"data[{number}] = {row!r:.60}: expected a dict, because data is {expected}")
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
            except TypeError as error:
                raise UserError(f"data[{number}] = {row!r:.60}: {error}; use text, numbers and lists") from None
