"""Reads labelled data as rows of named columns from TSV, CSV, JSON Lines and TensorFlow Datasets."""

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from bertjax.config import UserError
from bertjax.data import fingerprints
from bertjax.files import parse_json, read_whole

SUFFIXES = (".csv", ".tsv", ".jsonl")
csv.field_size_limit(2**31 - 1)  # a whole document may be one cell
TFDS = "tfds:"  # prefix of a `config.data.path` that names a TensorFlow dataset


class Row(NamedTuple):
    """The columns of an example and its location for error messages, "FILE:LINE"."""

    columns: dict[str, str]
    where: str


def read_table(path: epath.PathLike, names: Sequence[str] = (), drop_ragged: bool = False) -> tuple[list[Row], int]:
    """Returns the rows of a .tsv, .csv or .jsonl file, and the number of dropped rows.

    Args:
      path: a .tsv has one row per line and no quoting; a .csv follows RFC 4180.
      names: of the columns, if the file has no header line.
      drop_ragged: drop rows with a wrong number of columns instead of raising an error.

    Raises `UserError` if the file is missing, has no rows, a row with a wrong number of columns or two columns of one
    name, or is not UTF-8, CSV or JSON.
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
    """Finds NAME.csv, NAME.tsv or NAME.jsonl in `config.data.path`. Raises `UserError` unless exactly one exists."""
    found = [path for suffix in SUFFIXES if (path := epath.Path(folder) / (name + suffix)).exists()]
    if len(found) != 1:
        which = f"both {found[0].name} and {found[1].name}" if found else f"no {name}.csv, {name}.tsv or {name}.jsonl"
        raise UserError(f"config.data.path = {folder!r}: {which} in it")
    return found[0]


def read_text(path: epath.PathLike) -> str:
    """Returns the content of a file. Raises `UserError` if it does not exist or is not UTF-8."""
    path = epath.Path(path)
    if not path.is_file():
        raise UserError(f"no file {path}")
    fingerprints.note(path)
    try:
        return read_whole(path).decode("utf-8-sig")
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
    # Not splitlines, which also splits at line separators that are valid inside a TSV cell.
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
            value = parse_json(line, dict[str, Any])
        except ValueError as error:
            raise UserError(f"{path}:{number}: not a JSON object of columns ({error})") from None
        rows.append(_row(value, f"{path}:{number}"))
    return rows


def _row(values: dict, where: str) -> Row:
    """Encodes values other than strings as JSON, and omits null values."""
    present = {name: value for name, value in values.items() if value is not None}
    return Row({k: v if isinstance(v, str) else json.dumps(v) for k, v in present.items()}, where)


def read_tfds(path: str, split: str) -> list[Row]:
    """Returns the examples of a split of the TensorFlow dataset "tfds:NAME"; class labels become their names.

    Raises `UserError` if the dataset cannot be loaded.
    """
    import tensorflow_datasets as tfds

    from bertjax.data.tf import untuned

    name = path.removeprefix(TFDS)
    try:
        builder = tfds.builder(name)
        builder.download_and_prepare()
        dataset = builder.as_dataset(split=split, shuffle_files=False)
    except Exception as error:  # the library raises many types; each means that the dataset is unavailable
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"config.data.path: TensorFlow Datasets cannot load {name!r}, {split} ({reason})") from None

    def plain(feature, value):
        if isinstance(feature, tfds.features.Sequence):
            if isinstance(value, dict):
                return {key: [plain(feature.feature[key], part) for part in parts] for key, parts in value.items()}
            return [plain(feature.feature, part) for part in value]
        if isinstance(feature, tfds.features.ClassLabel):
            return feature.int2str(int(value)) if value >= 0 else ""
        return value.decode() if isinstance(value, bytes) else value.item()

    sizes = {name: part.num_bytes for name, part in builder.info.splits.items()}
    fingerprints.note_set(f"{path}, {split}", f"{builder.info.full_name} {sizes}")
    features = builder.info.features
    return [
        _row({key: plain(features[key], value) for key, value in example.items()}, f"{path}, {split} {number}")
        for number, example in enumerate(tfds.as_numpy(untuned(dataset)))
    ]


def column(row: Row, name: str) -> str:
    """Returns the value of a column. Raises `UserError` if the row has no such column."""
    if name not in row.columns:
        raise UserError(f"{row.where}: no column {name!r}; there are {', '.join(row.columns)}")
    return row.columns[name]
