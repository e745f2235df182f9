"""The texts that a command reads: texts on the command line, lines of a file, or a column of a table."""

import dataclasses
from collections.abc import Iterator, Sequence

from etils import epath

from bertjax.common.errors import UserError
from bertjax.data.corpus import tables


@dataclasses.dataclass(frozen=True)
class TextInput:
    """Texts in memory, followed by the lines of a file, or by a column of a table. Iterates over the texts.

    Each loop over the object reads the file again, so that the file may be larger than the memory.

    Attributes:
      texts: the texts in memory.
      path: a file with one text per line, or a table; "" without a file.
      column: the column of the texts of a table.
      id_column: the column of the ids of a table; "" without ids.
    """

    texts: Sequence[str] = ()
    path: str = ""
    column: str = "text"
    id_column: str = ""

    def __iter__(self) -> Iterator[str]:
        """Yields the texts, also empty ones, so that text i of a file is line i.

        Raises:
          UserError: if the file cannot be read, or if the table has no such column.
        """
        yield from self.texts
        if is_table(self.path):
            yield from self._cells(self.column, "texts")
        elif self.path:
            yield from read_text_lines(self.path)

    def check(self, checkpoint: str) -> None:
        """Raises `UserError` if there is no text for a checkpoint, or if the table lacks a column."""
        if next(iter(self), None) is None:
            raise missing_text(checkpoint, self.path)
        if self.id_column:
            next(self.ids())

    def ids(self) -> Iterator[str]:
        """Yields the ids of the texts. Raises `UserError` if the table has no such column."""
        return self._cells(self.id_column, "id")

    @property
    def size(self) -> int:
        """The size of the file in bytes; 0 without a file."""
        return epath.Path(self.path).stat().length if self.path else 0

    def _cells(self, column: str, flag: str) -> Iterator[str]:
        for row in tables.rows_of(self.path):
            if column not in row.columns:
                columns = ", ".join(row.columns)
                raise UserError(f"{row.where}: no column {column!r}; set --{flag} to one of {columns}")
            yield tables.column(row, column)


def is_table(path: str) -> bool:
    """Returns whether the name of a file is the name of a table, such as texts.csv."""
    return path.endswith(tables.SUFFIXES)


def missing_text(checkpoint: str, path: str) -> UserError:
    """Returns the error of a command that got a checkpoint but no text; `path` is the file of texts, or ""."""
    if path:
        return UserError(f"--input={path}: contains no text; write one text per line")
    return UserError(f"no text for the checkpoint {checkpoint!r}: add a text, or name a file with --input")


def read_text_lines(name: str) -> Iterator[str]:
    """Yields the lines of a file. Raises `UserError` if the file is missing, a folder, compressed, or not in UTF-8."""
    path = epath.Path(name)
    if path.is_dir():
        raise UserError(f"--input={name}: is a folder; name a file with one text per line")
    if not path.is_file():
        raise UserError(f"--input={name}: no such file; correct the path")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.startswith(b"\x1f\x8b"):
                raise UserError(f"--input: {name} is compressed; unpack it first")
            try:
                text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                place = f"{name}:{number}"
                raise UserError(f"--input: {place} is not UTF-8 ({error.reason} at byte {error.start})") from None
            yield from text.split("\r")
