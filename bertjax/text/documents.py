"""Reads documents from .txt, .jsonl and .parquet files, given as files, folders or globs, also on gs://."""

import dataclasses
import glob
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator

import zstandard
from etils import epath

from bertjax.config import UserError

COMPRESSIONS = {
    ".gz": lambda file: gzip.open(file),
    ".xz": lambda file: lzma.open(file),
    ".zst": lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
}
SUFFIXES = (".txt", ".jsonl", ".parquet")
MAX_DOCUMENT_CHARACTERS = 20_000_000  # workers hold whole documents; the longest books have a quarter of that
READABLE = "supported are .txt and .jsonl, plain or as .gz, .xz, .zst, and .parquet"
PARQUET_ROWS = 1024  # that are read at a time


@dataclasses.dataclass(frozen=True)
class Document:
    """Consecutive text.

    Attributes:
      source: its location for messages, "FILE:LINE".
      lines: its paragraphs or sentences.
      bytes: how much of the file, as it is stored, has been read since the document before; for progress.
    """

    source: str
    lines: list[str]
    bytes: int = 0


def read_documents(source: str, text_column: str = "text") -> Iterator[Document]:
    """Yields the documents of a file, a folder (recursively) or a glob, in the order of the sorted paths.

    `text_column` is the field of .jsonl and the column of .parquet files that has the text. Raises `UserError` with
    file and line if text cannot be read, and if there are no documents.
    """
    found = False
    for path in find_files(source):
        kind = _suffixes(path)[0]
        if kind == ".txt":
            read = _read_txt(path)
        else:
            read = (_read_jsonl if kind == ".jsonl" else _read_parquet)(path, text_column)
        for document in read:
            found = True
            yield document
    if not found:
        raise UserError(f"data.corpus: {source!r} contains no text; {READABLE}")


def find_files(source: str) -> list[epath.Path]:
    """Returns the corpus files that `source` names, sorted. Raises `UserError` if there are none."""
    path = epath.Path(source)
    if any(character in source for character in "*?[") and not path.exists():
        files = [p for p in _glob(source) if _suffixes(p)[0] in SUFFIXES and p.is_file()]
    elif path.is_dir():
        files = [p for p in _walk(path) if _suffixes(p)[0] in SUFFIXES]
    elif not path.exists():
        raise UserError(f"data.corpus: no file or folder {source!r}")
    elif _suffixes(path)[0] not in SUFFIXES:
        raise UserError(f"data.corpus: cannot read {source!r}; {READABLE}")
    else:
        return [path]
    if not files:
        raise UserError(f"data.corpus: no text files in {source!r}; {READABLE}")
    return sorted(files, key=str)


def _glob(pattern: str) -> list[epath.Path]:
    if "://" not in pattern:
        return [epath.Path(p) for p in glob.glob(pattern, recursive=True)]
    scheme, _, rest = pattern.partition("://")
    bucket, _, rest = rest.partition("/")
    try:
        return list(epath.Path(f"{scheme}://{bucket}").glob(rest))
    except NotImplementedError as error:
        raise UserError(
            f"data.corpus: {pattern!r}: {error}; name a folder instead, which is read recursively"
        ) from None


def _walk(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


def _suffixes(path: epath.Path) -> tuple[str, str]:
    """Returns (".txt", ".gz") for "a.txt.gz" and (".txt", "") for "a.txt"."""
    name, compression = path.name.lower(), ""
    for suffix in COMPRESSIONS:
        if name.endswith(suffix):
            name, compression = name.removesuffix(suffix), suffix
    return name[name.rfind(".") :] if "." in name else "", compression


def _read_lines(path: epath.Path) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its line ending), decompressed and decoded."""
    compression = _suffixes(path)[1]
    number = 0
    try:
        with path.open("rb") as raw:
            file = COMPRESSIONS[compression](raw) if compression else raw
            for number, line in enumerate(_split_lines(file), 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield number, text.rstrip("\r\n")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise UserError(
            f"{path}:{number}: byte {error.start + 1} of the line, 0x{bad:02x}, is not UTF-8; "
            f"convert the file (for example with iconv -f latin1 -t utf-8)"
        ) from None
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path}: damaged or not {compression} ({error}); download or compress it again") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _split_lines(file) -> Iterator[bytes]:
    """Yields the lines of a binary stream; zstandard's streams cannot iterate over lines."""
    rest = b""
    while chunk := file.read(1 << 20):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        yield from lines
    if rest:
        yield rest


def _read_txt(path: epath.Path) -> Iterator[Document]:
    """Yields the documents of a text file; a blank line ends a document."""
    lines, start, characters = [], 1, 0
    for number, line in _read_lines(path):
        if line := line.strip():
            if not lines:
                start, characters = number, 0
            lines.append(line)
            characters += len(line)
            if characters > MAX_DOCUMENT_CHARACTERS:
                raise UserError(
                    f"{path}:{start}: a document of more than {MAX_DOCUMENT_CHARACTERS:,} characters; put a blank line "
                    f"between documents"
                )
        elif lines:
            yield Document(f"{path}:{start}", lines)
            lines = []
    if lines:
        yield Document(f"{path}:{start}", lines)


def _read_jsonl(path: epath.Path, field: str) -> Iterator[Document]:
    """Yields a field of the object in each line as a document."""
    for number, line in _read_lines(path):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
            text.encode()  # "\\ud800" is valid JSON, but not a character
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            text = None
        if not isinstance(text, str):
            raise UserError(
                f'{path}:{number}: not a JSON object with a string "{field}" (config.data.text_column): {line[:60]!r}'
            )
        if lines := text_lines(text):
            yield Document(f"{path}:{number}", lines)


def _read_parquet(path: epath.Path, column: str) -> Iterator[Document]:
    """Yields the texts of a column as documents, `PARQUET_ROWS` at a time; leaves out empty ones."""
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with path.open("rb") as raw:
            file = parquet.ParquetFile(raw, page_checksum_verification=True)
            types = {field.name: field.type for field in file.schema_arrow}
            if column not in types:
                raise UserError(
                    f"config.data.text_column = {column!r}: {path} has no such column; it has {', '.join(types)}"
                )
            if not (pyarrow.types.is_string(types[column]) or pyarrow.types.is_large_string(types[column])):
                raise UserError(f"config.data.text_column = {column!r}: {path} has {types[column]} there, not text")
            for batch in file.iter_batches(PARQUET_ROWS, columns=[column], use_threads=False):
                for text in batch.column(0).to_pylist():
                    row += 1
                    if lines := text_lines(text or ""):
                        yield Document(f"{path}:{row}", lines)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{path}: cannot be read as Parquet after row {row} ({reason})") from None


def text_lines(text: str) -> list[str]:
    """Returns the lines of a text that are not blank, stripped."""
    return [line for part in text.splitlines() if (line := part.strip())]
