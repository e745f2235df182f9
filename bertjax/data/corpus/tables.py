"""Reads labelled data as rows of named columns from TSV, CSV, JSON Lines and TensorFlow Datasets."""

import array
import copy
import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TextIO, overload

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import open_to_read, parse_texts, read_whole
from bertjax.data.corpus import fingerprints

SUFFIXES = (".csv", ".tsv", ".jsonl")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
OPENING_QUOTE = re.compile(r'(?:\A|\t)"')  # matches a quote at the start of a cell of a .tsv
MAX_SHARED_LENGTH, MAX_SHARED = 40, 10_000  # short cells, such as labels, are stored once: characters, number of cells
csv.field_size_limit(2**31 - 1)  # a cell may be a whole document
TFDS = "tfds:"  # prefix of a `config.data.path` that names a TensorFlow dataset


class Row(NamedTuple):
    """The columns of an example.

    Attributes:
      columns: the values by the name of the column: text, or values of JSON and TensorFlow Datasets. The function
        `column` converts a value to text.
      where: the location for error messages, "FILE:LINE".
    """

    columns: dict[str, Any]
    where: str


class TableRows(Sequence[Row]):
    """The rows of a file, stored in little memory. Each access creates a `Row`."""

    def __init__(self, file: epath.PathLike):
        """Creates an empty table for the rows of a file."""
        self._file = str(file)
        self._names: list[tuple[str, ...]] = []  # column names of each row; rows with equal names share one tuple
        self._cells: list = []  # cells of all rows in succession
        self._starts, self._lines = array.array("q"), array.array("q")
        self._shared: dict = {}

    def append(self, names: Iterable[str], cells: Iterable, line: int) -> None:
        """Appends the row of a line of the file."""
        names = tuple(names)
        self._names.append(self._shared.setdefault(names, names))
        self._starts.append(len(self._cells))
        self._cells.extend(map(self._share, cells))
        self._lines.append(line)

    def select(self, numbers: Sequence[int]) -> "TableRows":
        """Returns the rows with these numbers. Both tables share the cells."""
        subset = copy.copy(self)
        subset._names = [self._names[number] for number in numbers]
        subset._starts, subset._lines = (
            array.array("q", (values[number] for number in numbers)) for values in (self._starts, self._lines)
        )
        return subset

    def _share(self, cell: Any) -> Any:
        """Returns the stored cell that equals a short cell, or stores it."""
        if not isinstance(cell, str) or len(cell) > MAX_SHARED_LENGTH or len(self._shared) > MAX_SHARED:
            return cell
        return self._shared.setdefault(cell, cell)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Returns a row, or a list of rows."""
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        names, start = self._names[index], self._starts[index]
        return Row(dict(zip(names, self._cells[start : start + len(names)])), f"{self._file}:{self._lines[index]}")


def read_table(
    path: epath.PathLike, names: Sequence[str] = (), drop_ragged: bool = False, quoting: bool = True
) -> tuple[TableRows, int]:
    """Reads a .tsv, .csv or .jsonl file.

    Skips columns without a name, rows of empty cells, and empty cells at the end of rows.

    Args:
      path: a .csv follows RFC 4180; a .tsv has one row per line, or is quoted like a .csv, see `_is_quoted`.
      names: the names of the columns, if the file has no header line.
      drop_ragged: drops rows with a wrong number of columns instead of raising an error.
      quoting: False if quotes in a .tsv are part of the text.

    Returns:
      The rows, and the number of dropped rows.

    Raises:
      UserError: the file is missing, or is not UTF-8, CSV or JSON; the table has no rows, a row with a wrong number of
        columns, two columns with the same name, or another separator than the suffix of the file requires.
    """
    path = epath.Path(path)
    rows, dropped = TableRows(path), 0
    for row in _rows(path, names, drop_ragged, quoting):
        if row is None:
            dropped += 1
        else:
            rows.append(*row)
    fingerprints.add_file(path)
    return rows, dropped


def rows_of(path: epath.PathLike) -> Iterator[Row]:
    """Yields the rows of `read_table`, with one row in memory at a time. Raises the same errors."""
    for row in _rows(epath.Path(path)):
        if row is not None:
            names, cells, line = row
            yield Row(dict(zip(names, cells)), f"{path}:{line}")


def find_table(folder: str, name: str) -> epath.Path:
    """Finds NAME.csv, NAME.tsv or NAME.jsonl in `config.data.path`. Raises `UserError` unless exactly one exists."""
    if epath.Path(folder).is_file():
        raise UserError(
            f"config.data.path = {folder!r}: must be a folder, or a file that ends in {', '.join(SUFFIXES)}"
        )
    paths = [path for suffix in SUFFIXES if (path := epath.Path(folder) / (name + suffix)).exists()]
    if not paths:
        raise missing_file(folder, f"{name}.csv, {name}.tsv or {name}.jsonl")
    if len(paths) > 1:
        raise UserError(
            f"config.data.path = {folder!r}: the folder has both {paths[0].name} and {paths[1].name}; delete one"
        )
    return paths[0]


def missing_file(folder: str, names: str) -> UserError:
    """Returns the error about a `config.data.path` that lacks the named files, or that does not exist."""
    problem = f"the folder has no {names}" if epath.Path(folder).is_dir() else "no such file or folder"
    return UserError(f"config.data.path = {folder!r}: {problem}; correct the path")


def read_text(path: epath.PathLike) -> str:
    """Returns the content of a file. Raises `UserError` if the file does not exist or is not UTF-8."""
    path = epath.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; correct the path")
    fingerprints.add_file(path)
    try:
        return read_whole(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _rows(
    path: epath.Path, names: Sequence[str] = (), drop_ragged: bool = False, quoting: bool = True
) -> Iterator[tuple[Iterable[str], Iterable, int] | None]:
    """Yields (column names, cells, line number) of each row; None for a dropped row. See `read_table`."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; correct the path")
    is_empty, is_json = True, path.suffix == ".jsonl"
    for row in _json_rows(path) if is_json else _separated_rows(path, names, drop_ragged, quoting):
        is_empty = is_empty and row is None
        yield row
    if is_empty:
        raise UserError(f"{path}: has no example; add at least one")


def _separated_rows(
    path: epath.Path, names: Sequence[str], drop_ragged: bool, quoting: bool
) -> Iterator[tuple[Iterable[str], Iterable, int] | None]:
    """Yields the rows of a .csv or .tsv, see `_rows`."""
    separator = "," if path.suffix == ".csv" else "\t"
    is_quoted = separator == "," or (quoting and _is_quoted(path))
    numbered = _quoted_lines(path, separator) if is_quoted else _plain_lines(path)
    if not names:
        number, header = next(numbered, (0, []))
        names = _header(f"{path}:{number}", header, separator)
    used_names = tuple(name for name in names if name)
    width, used = _width(names), [i for i, name in enumerate(names) if name]
    for number, cells in numbered:
        if separator == "\t" and is_quoted and _holds_rows(cells, width):
            raise UserError(
                f"{path}:{number}: whole rows are between the quote in this line and the next quote; double the quotes "
                f"of the text"
            )
        if _width(cells) <= width <= len(cells):
            yield used_names, [cells[i] for i in used], number
        elif drop_ragged:
            yield None
        else:
            count = max(_width(cells), min(len(cells), width))
            raise UserError(f"{path}:{number}: {count} columns, expected {width}: {', '.join(used_names)}")


def _header(where: str, cells: Sequence[str], separator: str) -> list[str]:
    """Returns the names of the columns; "" for columns without a name."""
    names = [name.strip() for name in cells]
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise UserError(f"{where}: two columns have the name {twice[0]!r}; rename one")
    if _width(names) == 1 and (used := [sign for sign in SEPARATORS if sign != separator and sign in cells[0]]):
        raise UserError(
            f"{where}: one column, {names[0]!r}: the columns seem to be separated by {SEPARATORS[used[0]]}, not by "
            f"{SEPARATORS[separator]}; save the file with {SEPARATORS[separator]}"
        )
    return names


def _width(cells: Sequence[str]) -> int:
    """Returns the number of cells without empty cells at the end."""
    width = len(cells)
    while width and not cells[width - 1].strip():
        width -= 1
    return width


def _is_quoted(path: epath.Path) -> bool:
    """Returns whether quotes enclose the cells of a TSV, as in files of pandas. Otherwise, quotes are part of the text.

    Parses the file with and without enclosing quotes, and compares the numbers of columns of all rows:
    - If all rows have the same number in one case only, this case is true.
    - If all rows have the same number in both cases, each line must be one row; then quotes enclose cells if they
      enclose a cell of the header, or a cell with doubled quotes.
    - If rows differ in both cases, the case with more rows before the first different row is true.
    """
    if not any(map(OPENING_QUOTE.search, lines_with_ends(path))):
        return False
    odd_plain, odd_quoted = _first_odd(_plain_lines(path)), _first_odd(_quoted_lines(path, "\t"))
    if odd_plain:
        return not odd_quoted or odd_quoted > odd_plain
    if odd_quoted:
        return False
    is_header, encloses = True, False
    pairs = itertools.zip_longest(_plain_lines(path), _quoted_lines(path, "\t"), fillvalue=(0, ()))
    for (line, plain), (same_line, quoted) in pairs:
        if line != same_line:
            return False
        encloses |= any(p.startswith('"') and (is_header or '"' in q) for p, q in zip(plain, quoted))
        is_header = False
    return encloses


def _first_odd(lines: Iterator[tuple[int, list[str]]]) -> int:
    """Returns the first line number of a TSV whose number of columns differs from the header; 0 if all are equal."""
    number = 0
    try:
        number, header = next(lines, (0, []))
        width = _width(header)
        for number, cells in lines:
            if not _width(cells) <= width <= len(cells):
                return number
    except UserError:  # a quote is not closed
        return number + 1
    return 0


def _holds_rows(cells: Sequence[str], width: int) -> bool:
    """Returns whether a quoted cell contains whole rows. The quotes then belong to the texts of two different rows."""
    for place, cell in enumerate(cells):
        tabs = [line.count("\t") for line in cell.split("\n")] if "\n" in cell else ()
        if tabs and tabs == [width - 1 - place, *[width - 1] * (len(tabs) - 2), place]:
            return True
    return False


def lines_with_ends(path: epath.Path) -> Iterator[str]:
    """Yields the lines of a file with their line ends."""
    with io.BytesIO(read_whole(path)) if "://" in str(path) else open_to_read(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UserError(f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start})") from None
            if number == 1 and "\n" not in text:
                yield from io.StringIO(text.replace("\r", "\n"))  # line ends of old Macs
            else:
                yield text


def _plain_lines(path: epath.Path) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines_with_ends(path), 1):
        if line.strip():
            yield number, line.rstrip("\r\n").split("\t")


def _quoted_lines(path: epath.Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    # The space after a separator is not part of a cell, because a quote may follow the space.
    reader = csv.reader(lines_with_ends(path), delimiter=separator, skipinitialspace=True, strict=True)
    first = 1
    try:
        for cells in reader:
            if _width(cells):
                yield first, cells
            first = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{first}: not CSV ({error})") from None


def _json_rows(path: epath.Path) -> Iterator[tuple[Iterable[str], Iterable, int]]:
    for number, line in enumerate(lines_with_ends(path), 1):
        if not line.strip():
            continue
        try:
            value = parse_texts(line, dict[str, Any])
        except ValueError as error:
            raise UserError(f"{path}:{number}: not a JSON object of columns ({error})") from None
        yield value, value.values(), number


class TableWriter:
    """Writes rows of columns to a .csv, .tsv or .jsonl file.

    The first row determines the columns of a .csv or .tsv. Cells are written as text, other values as JSON, and None as
    an empty cell. Quotes enclose cells as in a .csv.
    """

    def __init__(self, path: epath.Path, file: TextIO):
        """Creates a writer.

        Args:
          path: the path, whose suffix determines the format.
          file: the opened file.
        """
        self._path, self._file = path, file
        self._names: list[str] | None = None
        self._separator = "," if path.suffix == ".csv" else "\t"
        self._is_table = path.suffix != ".jsonl"

    def write(self, columns: dict[str, Any], where: str) -> None:
        """Writes a row.

        Args:
          columns: the values by the name of the column.
          where: the location of the row, for error messages.

        Raises:
          UserError: the first row does not have one of the columns.
        """
        if not self._is_table:
            self._file.write(json.dumps(columns, ensure_ascii=False) + "\n")
            return
        if self._names is None:
            self._names = list(columns)
            self._write(self._names)
        if more := [name for name in columns if name not in self._names]:
            raise UserError(f"{where}: earlier rows have no column {more[0]!r}; write a .jsonl, whose rows may differ")
        self._write([_as_text(columns.get(name)) for name in self._names])

    def _write(self, cells: list[str]) -> None:
        # QUOTE_MINIMAL does not quote "\r".
        quoting: Literal[0, 1] = csv.QUOTE_ALL if any("\r" in cell for cell in cells) else csv.QUOTE_MINIMAL
        csv.writer(self._file, delimiter=self._separator, lineterminator="\n", quoting=quoting).writerow(cells)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def read_tfds(path: str, split: str) -> list[Row]:
    """Returns the examples of a split of the TensorFlow dataset "tfds:NAME", with names of class labels.

    Raises:
      UserError: the dataset cannot be loaded.
    """
    from bertjax.data.tensorflow import load_dataset  # comes first: raises `UserError` without TensorFlow

    import tensorflow_datasets as tfds  # isort: skip

    builder, dataset, version = load_dataset(path.removeprefix(TFDS), split, "config.data.path")

    def plain(feature: Any, value: Any) -> Any:
        if isinstance(feature, tfds.features.Sequence):
            if isinstance(value, dict):
                return {key: [plain(feature.feature[key], part) for part in parts] for key, parts in value.items()}
            return [plain(feature.feature, part) for part in value]
        if isinstance(feature, tfds.features.ClassLabel):
            return feature.int2str(int(value)) if value >= 0 else ""
        return value.decode() if isinstance(value, bytes) else value.item()

    fingerprints.add_dataset(f"{path}, {split}", version)
    features = builder.info.features
    return [
        Row({key: plain(features[key], value) for key, value in example.items()}, f"{path}, {split} {number}")
        for number, example in enumerate(dataset.as_numpy_iterator())
    ]


def check_columns(row: Row, fields: Mapping[str, Iterable[str]]) -> None:
    """Checks that a row has the columns that fields of a config name.

    Args:
      row: the row.
      fields: {field or flag, such as "--config.data.label": the names of the columns}.

    Raises:
      UserError: the row lacks a column.
    """
    for field, names in fields.items():
        for name in names:
            if name not in row.columns:
                columns = ", ".join(row.columns)
                raise UserError(f"{row.where}: no column {name!r}; choose {field} from {columns}")


def cell(row: Row, name: str) -> Any:
    """Returns the value of a column. Raises `UserError` if the row has no such column."""
    if name not in row.columns:
        raise UserError(f"{row.where}: no column {name!r}; the columns are {', '.join(row.columns)}")
    return row.columns[name]


def column(row: Row, name: str) -> str:
    """Returns the value of a column as text: numbers and booleans as in JSON, but 1 for 1.0.

    Raises:
      UserError: the row has no such column, or the value is null, a list or an object.
    """
    value = cell(row, name)
    if isinstance(value, str):
        return value
    if value is None:
        raise UserError(f"{row.where}: {name} is null, expected text")
    if isinstance(value, (list, dict)):
        kind = "a list" if isinstance(value, list) else "an object"
        raise UserError(f"{row.where}: {name} is {kind}, expected text")
    return str(int(value)) if isinstance(value, float) and value.is_integer() else json.dumps(value)
