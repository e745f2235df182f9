"""Labelled data as rows of named columns: TSV, CSV, JSON lines, and TensorFlow Datasets."""

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from etils import epath

from bertjax.config import UserError

SUFFIXES = (".csv", ".tsv", ".jsonl")
csv.field_size_limit(2**31 - 1)  # a whole document may be one cell
TFDS = "tfds:"  # what a `config.data.path` begins with that is no folder


class Row(NamedTuple):
    """The columns of an example, and where it stands, for messages: "FILE:LINE"."""

    columns: dict[str, str]
    where: str


def read_table(path: epath.PathLike, names: Sequence[str] = (), drop_ragged: bool = False) -> tuple[list[Row], int]:
    """The rows of a .tsv, .csv or .jsonl file, and how many were dropped.

    Args:
      path: a .tsv has a row a line and no quoting; a .csv follows RFC 4180.
      names: of the columns, where the file has no line with them.
      drop_ragged: leave out rows with a wrong number of columns. Otherwise they are an error.

    Raises `UserError`: no such file, no row, a row of a wrong number of columns, not UTF-8, not JSON.
    """
    path = epath.Path(path)
    text = read_text(path)
    if path.suffix == ".jsonl":
        rows, dropped = _json_rows(path, text), 0
    else:
        rows, dropped = _separated_rows(path, text, names, drop_ragged)
    if not rows:
        raise UserError(f"{path}: no example in it")
    return rows, dropped


def find_table(folder: str, name: str) -> epath.Path:
    """NAME.csv, NAME.tsv or NAME.jsonl in the folder `config.data.path`. Raises `UserError` where it is not one."""
    found = [path for suffix in SUFFIXES if (path := epath.Path(folder) / (name + suffix)).exists()]
    if len(found) != 1:
        which = f"both {found[0].name} and {found[1].name}" if found else f"no {name}.csv, {name}.tsv or {name}.jsonl"
        raise UserError(f"config.data.path = {folder!r}: {which} in it")
    return found[0]


def read_text(path: epath.PathLike) -> str:
    """Raises `UserError` where there is no such file, or it is not UTF-8."""
    path = epath.Path(path)
    if not path.is_file():
        raise UserError(f"no file {path}")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _separated_rows(path, text: str, names: Sequence[str], drop_ragged: bool) -> tuple[list[Row], int]:
    lines = _csv_lines(path, text) if path.suffix == ".csv" else _tsv_lines(text)
    if not names:
        number, names = next(lines, (0, ()))
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise UserError(f"{path}:{number}: two columns are named {twice[0]!r}")
    rows, dropped = [], 0
    for number, cells in lines:
        if len(cells) == len(names):
            rows.append(Row(dict(zip(names, cells)), f"{path}:{number}"))
        elif drop_ragged:
            dropped += 1
        else:
            raise UserError(f"{path}:{number}: {len(cells)} columns, expected {len(names)}: {', '.join(names)}")
    return rows, dropped


def _tsv_lines(text: str):
    # Not splitlines, which knows more ends of a line than a TSV does.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip("\r"):
            yield number, line.rstrip("\r").split("\t")


def _csv_lines(path, text: str):
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    first = 1
    try:
        for cells in reader:
            if cells:
                yield first, cells
            first = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{first}: not CSV ({error})") from None


def _json_rows(path, text: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{number}: not JSON ({error})") from None
        if not isinstance(value, dict):
            raise UserError(f"{path}:{number}: not a JSON object with the columns as names")
        rows.append(_row(value, f"{path}:{number}"))
    return rows


def _row(values: dict, where: str) -> Row:
    """What is no text is JSON; what is null is not there."""
    present = {name: value for name, value in values.items() if value is not None}
    return Row({k: v if isinstance(v, str) else json.dumps(v) for k, v in present.items()}, where)


def read_tfds(path: str, split: str) -> list[Row]:
    """The examples of a split of TensorFlow Datasets, "tfds:NAME"; class labels by their names.

    Raises `UserError` where it cannot be had.
    """
    import tensorflow_datasets as tfds

    import bertjax.data.tf  # noqa: F401  keeps TensorFlow off accelerators

    name = path.removeprefix(TFDS)
    try:
        builder = tfds.builder(name)
        builder.download_and_prepare()
        dataset = builder.as_dataset(split=split, shuffle_files=False)
    except Exception as error:  # the library raises many kinds; each means that this cannot be had
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"config.data.path: TensorFlow Datasets cannot give {name!r}, {split} ({reason})") from None

    def plain(feature, value):
        if isinstance(feature, tfds.features.Sequence):
            if isinstance(value, dict):
                return {key: [plain(feature.feature[key], part) for part in parts] for key, parts in value.items()}
            return [plain(feature.feature, part) for part in value]
        if isinstance(feature, tfds.features.ClassLabel):
            return feature.int2str(int(value)) if value >= 0 else ""
        return value.decode() if isinstance(value, bytes) else value.item()

    features = builder.info.features
    return [
        _row({key: plain(features[key], value) for key, value in example.items()}, f"{path}, {split} {number}")
        for number, example in enumerate(tfds.as_numpy(dataset))
    ]


def column(row: Row, name: str) -> str:
    """Raises `UserError` where the row has no such column."""
    if name not in row.columns:
        raise UserError(f"{row.where}: no column {name!r}; there are {', '.join(row.columns)}")
    return row.columns[name]
