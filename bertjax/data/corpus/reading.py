"""Reads documents from .txt, .jsonl, .json and .parquet files: files, folders or globs, also on gs:// and s3://."""

import bz2
import collections
import dataclasses
import functools
import glob
import lzma
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import fsspec
import pyarrow
import zstandard
from fsspec.utils import glob_translate
from pyarrow import fs

from bertjax.common import surrogates
from bertjax.common.errors import UserError
from bertjax.common.files import open_to_read, parse_texts

# Suffix -> decompressor of one stream of a file. The file objects of the libraries hide damage: the object of
# python-zstandard accepts an unfinished frame, the object of lzma ignores invalid data after the first stream.
DECOMPRESSORS = {
    ".gz": lambda: zlib.decompressobj(wbits=31),  # the format of gzip, which has a checksum
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".zst": lambda: zstandard.ZstdDecompressor(
        max_window_size=2**31
    ).decompressobj(),  # the largest window that zstd writes
}
SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
BEGINNINGS = {  # first bytes, after decompression, -> format of files that are not text
    b"\x1f\x8b": "compressed (.gz)",
    b"\xfd7zXZ\x00": "compressed (.xz)",
    b"\x28\xb5\x2f\xfd": "compressed (.zst)",
    b"BZh": "compressed (.bz2)",
    b"PK\x03\x04": "a .zip archive, or an Office document",
    b"%PDF-": "a PDF",
    b"PAR1": "Parquet",
    b"\xff\xfe": "UTF-16 (convert it with iconv -f utf-16 -t utf-8)",
    b"\xfe\xff": "UTF-16 (convert it with iconv -f utf-16 -t utf-8)",
}
SNIFFED_BYTES = 64  # first bytes; text has hardly any zeros among them
MAX_DOCUMENT_CHARACTERS = 20_000_000  # workers hold whole documents; the longest books have 5 million
MAX_LINE_BYTES = 8 * MAX_DOCUMENT_CHARACTERS  # a JSON object contains a document and other fields
READABLE = "supported are .txt, .jsonl and .json (JSON lines), plain or as .gz, .bz2, .xz, .zst, and .parquet"
TO_JSON_LINES = "write an object with the text in each line, with jq -c '.[]' for an array"
HIDDEN, NO_SUFFIX = "hidden", "without a suffix"  # kinds of files that are not read; other kinds are suffixes
REMEDIES = {  # by kind; other kinds, such as images, have no remedy
    **dict.fromkeys((NO_SUFFIX, ".md", ".rst", ".text", ".tex", ".log"), "rename text to .txt"),
    **dict.fromkeys((".ndjson", ".jsonlines", ".jl"), "rename to .jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "write as .jsonl, or name hf:FOLDER"),
    **dict.fromkeys((".html", ".htm", ".xml", ".pdf", ".docx", ".epub"), "extract the text to .txt"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z"), "unpack first"),
    ".arrow": "write as .parquet",
    "folder": "name the folders, or write ** in the pattern",
}
MAX_NAMED, MAX_NAMED_KINDS = 3, 4  # files, and kinds of files, that a message names
PARQUET_ROWS = 64  # rows read at a time
CHUNK_BYTES = 1 << 18  # bytes read at a time
REQUEST_SECONDS = 120  # limit for repeated requests to gs://; the default of the library is 15 minutes


@dataclasses.dataclass(frozen=True)
class Document:
    """Consecutive text.

    Attributes:
      source: the location for messages, "FILE:LINE".
      lines: the paragraphs or sentences.
    """

    source: str
    lines: list[str]


class File(NamedTuple):
    """A file of a corpus.

    Attributes:
      path: the path or URL.
      size: the size in bytes as stored.
      modified: the time of the last change, counted from 1970; 0 if unknown. The unit is nanoseconds for local files,
        and seconds for remote files, because listings of remote files have no nanoseconds.
    """

    path: str
    size: int
    modified: int


SKIP = "correct the document, or skip such documents with --config.data.on_bad_document=skip"


@dataclasses.dataclass
class ReadOptions:
    """Options for reading text. A subclass can handle the events of reading.

    Attributes:
      text_column: the field of .jsonl files and the column of .parquet files with the text.
      document: the unit of a document in .txt files: blank_line (text between blank lines), file, or line.
    """

    text_column: str = "text"
    document: str = "blank_line"

    def on_bad(self, fault: str, remedy: str = SKIP) -> None:
        """Raises `UserError` for an invalid document. If an override returns, the document is skipped.

        Args:
          fault: "FILE:LINE: ...".
          remedy: the action that corrects the fault.
        """
        raise UserError(f"{fault}; {remedy}")

    def on_read(self, size: int) -> None:
        """Handles a chunk that was read, with its number of bytes as stored."""

    def count(self, event: str) -> None:
        """Handles an event of reading.

        Args:
          event: "files" for a file with documents, "empty_files" for a file without documents, or "empty_documents" for
            a document without text.
        """

    def on_skipped_file(self, path: str, fault: str) -> None:
        """Handles a .json file without JSON lines."""


class _IgnoringFaults(ReadOptions):
    def on_bad(self, fault: str, remedy: str = SKIP) -> None:
        pass


DEFAULT = ReadOptions()


def read_corpus_file(path: str, options: ReadOptions = DEFAULT) -> Iterator[Document]:
    """Yields the documents of a file.

    Raises:
      UserError: the file is damaged, cut off, or not text. The message contains the file and the line.
    """
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}
    suffix, is_empty = _suffixes(path)[0], True
    if suffix == ".json" and (fault := _fault_of_json(path, options)):
        options.on_skipped_file(path, fault)
        return
    for document in readers[suffix](path, options):
        is_empty = False
        yield document
    options.count("empty_files" if is_empty else "files")


def _fault_of_json(path: str, options: ReadOptions) -> str:
    """Returns the fault of a .json file whose first line is not an object with a text; "" for other files."""
    line = next((line for _, line in read_lines(path, _IgnoringFaults()) if line is None or line.strip()), None)
    if line is None:  # `_read_jsonl` reports a line that is too long or not text
        return ""
    try:
        fields = parse_texts(line, dict[str, Any])
    except ValueError:
        is_array = line.lstrip().startswith("[")
        return f"{'one JSON array' if is_array else 'no JSON lines'}; {TO_JSON_LINES}"
    if options.text_column in fields:
        return ""
    return f'no "{options.text_column}" in the first line, but {", ".join(fields) or "nothing"}; set data.text_column'


class Listing(NamedTuple):
    """The files of a source, sorted: corpus files, and the paths of files that are not read."""

    files: list[File]
    unread: list[str]


def list_files(source: str) -> Listing:
    """Lists the files of a source: a file, a folder (recursively) or a glob.

    Raises:
      UserError: there are no corpus files, or a folder or a link cannot be followed.
    """
    try:
        files, unread = (_find_remote if "://" in source else _find_local)(source)
    except FileNotFoundError as error:
        missing = (
            error.filename if isinstance(error.filename, str) and "://" not in source else source
        )  # the target of a link
        raise UserError(f"config.data.corpus = {missing!r}: no such file or folder; correct the path") from None
    except (OSError, pyarrow.ArrowException, ImportError, ValueError, NotImplementedError) as error:
        raise UserError(f"data.corpus: {source!r} cannot be listed ({first_line(error)})") from None
    if not files:
        kinds = describe_kinds(kinds_of(source, unread))
        raise UserError(f"data.corpus: no text files in {source!r}{f', but {kinds}' if kinds else ''}; {READABLE}")
    for file in files:  # manifests and messages name the files
        if file.path != surrogates.replaced(file.path):
            raise UserError(f"data.corpus: the name of {os.fsencode(file.path)!r} is not UTF-8; rename the file")
    return Listing(sorted(files), sorted(unread))


Kinds = dict[str, tuple[int, list[str]]]  # kind of files -> number of files, names of the first files


def kinds_of(source: str, paths: Iterable[str]) -> Kinds:
    """Returns the kinds of files that are not read. A kind is a suffix, `NO_SUFFIX`, `HIDDEN` or "folder"."""
    start = os.path.join(source, "") if not _is_pattern(source) else os.path.dirname(re.split(r"[*?[]", source)[0])
    by_kind = collections.defaultdict(list)
    for path in sorted(paths):
        name = path.removeprefix(start).lstrip("/")
        by_kind[_kind_of(name)].append(printable(name))
    return {kind: (len(names), names[:MAX_NAMED]) for kind, names in sorted(by_kind.items(), key=lambda x: -len(x[1]))}


def _kind_of(name: str) -> str:
    if name.endswith("/"):
        return "folder"
    if any(part.startswith(".") for part in name.split("/")):
        return HIDDEN
    suffix, compression = _suffixes(name)
    return f"{suffix}{compression}" or NO_SUFFIX


def describe_kinds(kinds: Kinds) -> str:
    """Describes files that are not read: "2 .csv (a.csv, b.csv): write as .jsonl; 1 hidden"."""
    by_remedy = collections.defaultdict(list)
    for kind in kinds:
        by_remedy[_remedy(kind)].append(kind)
    parts = []
    for remedy, group in by_remedy.items():
        count = sum(kinds[kind][0] for kind in group)
        names = [name for kind in group for name in kinds[kind][1]][:MAX_NAMED]
        named = f" ({', '.join(names)}{', ...' if count > len(names) else ''})"
        more = ", ..." if len(group) > MAX_NAMED_KINDS else ""
        parts.append(f"{count:,} {', '.join(group[:MAX_NAMED_KINDS])}{more}{named}{f': {remedy}' if remedy else ''}")
    return "; ".join(parts)


def _remedy(kind: str) -> str:
    return REMEDIES.get(kind) or REMEDIES.get(os.path.splitext(kind)[0], "")


def printable(name: str) -> str:
    """Returns the name of a file with line ends and invalid UTF-8 escaped."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def file_at(path: str) -> File:
    """Returns the current size and time of a file. Raises `UserError` if the file does not exist."""
    try:
        if "://" not in path:
            status = os.stat(path)
            return File(path, status.st_size, status.st_mtime_ns)
        filesystem, inner = _filesystem_of(path)
        info = filesystem.get_file_info(inner)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError("no such file")
        return _remote_file(path, info)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None


def _find_local(source: str) -> tuple[list[File], list[str]]:
    if _is_pattern(source) and not os.path.exists(source):
        matches = sorted(glob.glob(source, recursive=True))
        folders = {path for path in matches if os.path.isdir(path)}
        paths = [path for path in matches if path not in folders]
        unread = [path for path in paths if not _is_text(path)]
        read_from = {parent for path in paths for parent in pathlib.PurePath(path).parents}
        unread += [f"{path}/" for path in folders if pathlib.PurePath(path) not in read_from]
        return [file_at(path) for path in paths if _is_text(path)], unread
    if os.path.isdir(source):
        files, unread = [], []
        for entry in _walk(source.rstrip("/") or "/"):
            if _is_text(entry.name):
                status = entry.stat()
                files.append(File(entry.path, status.st_size, status.st_mtime_ns))
            else:
                unread.append(entry.path)
        return files, unread
    os.stat(source)
    return [file_at(_require_text(source))], []


def _walk(folder: str) -> Iterator[os.DirEntry]:
    """Yields the files in a folder and in its subfolders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path)
            else:
                yield entry


def _find_remote(source: str) -> tuple[list[File], list[str]]:
    filesystem, inner = _filesystem_of(source)
    # The prefix of URLs: prefix + path in the file system = URL.
    prefix = source.rstrip("/").removesuffix(inner.lstrip("/"))
    info = filesystem.get_file_info(inner)
    if info.type == fs.FileType.File:
        return [file_at(_require_text(source))], []
    folder, pattern = inner, None
    if info.type != fs.FileType.Directory:
        if not _is_pattern(source):
            raise FileNotFoundError
        # Lists all files under the folder, because folders of existing files need not exist on gs://.
        folder, pattern = re.split(r"/[^/]*[*?[]", inner)[0], re.compile(glob_translate(inner))
    infos = filesystem.get_file_info(fs.FileSelector(folder, recursive=True))
    infos = [info for info in infos if info.type != fs.FileType.Directory and (not pattern or pattern.match(info.path))]
    files = [_remote_file(prefix + info.path.lstrip("/"), info) for info in infos]
    return [file for file in files if _is_text(file.path)], [file.path for file in files if not _is_text(file.path)]


def _filesystem_of(path: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a URL, and the path in the file system."""
    scheme, _, rest = path.partition("://")
    authority, _, rest = rest.partition("/")
    filesystem, inner = _connect(scheme, authority)
    return filesystem, f"{inner}/{rest}".rstrip("/")


@functools.cache
def _connect(scheme: str, authority: str) -> tuple[fs.FileSystem, str]:
    url = f"{scheme}://{authority}"
    try:
        return fs.FileSystem.from_uri(f"{url}?retry_limit_seconds={REQUEST_SECONDS}" if scheme == "gs" else url)
    except pyarrow.ArrowInvalid:  # pyarrow does not support the scheme
        filesystem, inner = fsspec.url_to_fs(url)
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), inner


def _remote_file(url: str, info: fs.FileInfo) -> File:
    return File(url, info.size or 0, int(info.mtime.timestamp()) if info.mtime else 0)


def _is_pattern(source: str) -> bool:
    return any(character in source for character in "*?[")


def _require_text(source: str) -> str:
    """Returns the path. Raises `UserError` if the suffix is not supported."""
    if not _is_text(source):
        remedy = _remedy(_kind_of(os.path.basename(source)))
        raise UserError(f"data.corpus: cannot read {source!r}; {READABLE}{f'; {remedy}' if remedy else ''}")
    return source


def _is_text(path: str) -> bool:
    return _suffixes(path)[0] in SUFFIXES


def _suffixes(path: str) -> tuple[str, str]:
    """Returns (".txt", ".gz") for "a.txt.gz" and (".txt", "") for "a.txt"."""
    name, compression = os.path.splitext(path.lower())
    return (os.path.splitext(name)[1], compression) if compression in DECOMPRESSORS else (compression, "")


def is_plain_text(path: str) -> bool:
    """Returns whether a file is a .txt file, which `ReadOptions.document` divides into documents."""
    return _suffixes(path)[0] == ".txt"


def first_line(error: Exception) -> str:
    """Returns the first line of the message of an error; messages of libraries may have many lines."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


def _open(path: str, seekable: bool = False) -> BinaryIO:
    if "://" not in path:
        return open(path, "rb") if seekable else open_to_read(path)
    filesystem, inner = _filesystem_of(path)
    return filesystem.open_input_file(inner) if seekable else filesystem.open_input_stream(inner, compression=None)


def read_lines(path: str, options: ReadOptions) -> Iterator[tuple[int, str | None]]:
    """Yields (line number from 1, decompressed and decoded line without its line ending).

    Calls `options.on_bad` for a line that is too long or not UTF-8; the line is then None.
    """
    compression = _suffixes(path)[1]
    number = 0
    try:
        with _open(path) as file:
            chunks = _read_chunks(file, options.on_read)
            lines = _split_lines(_decompress(chunks, compression) if compression else chunks)
            for number, line in enumerate(lines, 1):
                if number == 1:
                    _check_beginning(path, line or b"")
                yield number, _decoded(path, number, line, options)
    except EOFError:
        raise UserError(f"{path}: cut off after line {number}; download or compress it again") from None
    except (lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(
            f"{path}: damaged after line {number}, or not {compression} ({error}); download or compress it again"
        ) from None
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read after line {number} ({first_line(error)})") from None


def _check_beginning(path: str, content: bytes) -> None:
    """Raises `UserError` if the first bytes of a file are typical of another format."""
    for beginning, form in BEGINNINGS.items():
        if content.startswith(beginning):
            within = f"the content is {form}" if _suffixes(path)[1] else f"the file is {form}, unlike its name"
            raise UserError(f"{path}: not text: {within}; {READABLE}")
    if 4 * content[:SNIFFED_BYTES].count(0) > len(content[:SNIFFED_BYTES]):
        raise UserError(f"{path}: not text: UTF-16 (convert it with iconv -f utf-16le -t utf-8), or binary; {READABLE}")


def _decoded(path: str, number: int, line: bytes | None, options: ReadOptions) -> str | None:
    if line is None:
        options.on_bad(f"{path}:{number}: a line of more than {MAX_LINE_BYTES:,} bytes")
        return None
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        options.on_bad(
            f"{path}:{number}: byte {error.start + 1} of the line, 0x{bad:02x}, is not UTF-8 (to convert a whole "
            f"file: iconv -f latin1 -t utf-8)"
        )
        return None


def _read_chunks(file: BinaryIO, on_read: Callable[[int], None]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        on_read(len(chunk))
        yield chunk


def _decompress(chunks: Iterable[bytes], compression: str) -> Iterator[bytes]:
    """Yields the content of the streams of a file in succession. Raises `EOFError` if the last stream is cut off."""
    new: Callable[[], Any] = DECOMPRESSORS[compression]
    stream = new()  # is None between streams, where a file may have padding of zeros
    for chunk in chunks:
        while chunk := chunk if stream else chunk.lstrip(b"\0"):
            stream = stream or new()
            yield stream.decompress(chunk)
            chunk, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
    if stream:
        raise EOFError


def _split_lines(chunks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yields lines; None for a line of more than `MAX_LINE_BYTES`."""
    parts: list[bytes] = []  # the parts of the unfinished line
    size = 0
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        size += len(first)
        parts = [*parts, first] if size <= MAX_LINE_BYTES else []
        if rest:
            yield b"".join(parts) if size <= MAX_LINE_BYTES else None
            yield from rest[:-1]
            parts, size = rest[-1:], len(rest[-1])
    if size:
        yield b"".join(parts) if size <= MAX_LINE_BYTES else None


def _read_txt(path: str, options: ReadOptions) -> Iterator[Document]:
    """Yields the documents of a text file, divided by `options.document`."""
    lines: list[str] = []
    start, characters, is_bad = 1, 0, False

    def end() -> Iterator[Document]:
        nonlocal lines, is_bad
        if lines and not is_bad:
            yield Document(f"{path}:{start}", lines)
        lines, is_bad = [], False

    for number, line in read_lines(path, options):
        text = line and line.strip()
        is_bad = is_bad or line is None
        if text and not is_bad:
            if not lines:
                start, characters = number, 0
            lines.append(text)
            characters += len(text)
            if characters > MAX_DOCUMENT_CHARACTERS:
                options.on_bad(
                    f"{path}:{start}: a document of more than {MAX_DOCUMENT_CHARACTERS:,} characters, with "
                    f"config.data.document = {options.document!r}"
                )
                lines, is_bad = [], True
        if options.document == "line" or (options.document == "blank_line" and text == ""):
            yield from end()
    yield from end()


def _read_jsonl(path: str, options: ReadOptions) -> Iterator[Document]:
    """Yields a field of the object in each line as a document."""
    field, has_field = options.text_column, False
    for number, line in read_lines(path, options):
        if line is None or not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            fields = parse_texts(line, dict[str, Any])
        except ValueError:
            options.on_bad(f"{where}: not a JSON object: {line[:60]!r}")
            continue
        text = fields.get(field)
        has_field = has_field or (field in fields and isinstance(text, str | None))
        if isinstance(text, str):
            yield from as_document(where, text, options)
            continue
        if field in fields:
            kind = "null" if text is None else type(text).__name__
            fault = f'{where}: "{field}" (config.data.text_column) is {kind}, not a string'
        else:
            fault = f'{where}: no "{field}" (config.data.text_column) among {", ".join(fields) or "no fields"}'
        texts = {name: value for name, value in fields.items() if isinstance(value, str) and value.strip()}
        if has_field or not texts:
            options.on_bad(fault)
        else:  # probably, all documents of the file have their text in another field, and skipping would omit all
            names = sorted(texts, key=lambda name: -len(texts[name]))
            options.on_bad(fault, f"fields with text: {', '.join(names)}; set --config.data.text_column={names[0]}")


def _read_parquet(path: str, options: ReadOptions) -> Iterator[Document]:
    """Yields the texts of a column as documents, `PARQUET_ROWS` at a time."""
    from pyarrow import parquet

    row, column = 0, options.text_column
    try:
        with _open(path, seekable=True) as raw:
            # The default buffers the column of a whole row group, which may be the whole file.
            file = parquet.ParquetFile(raw, page_checksum_verification=True, buffer_size=CHUNK_BYTES, pre_buffer=False)
            check_column(column, file.schema_arrow, path)
            size, rows = file_at(path).size, file.metadata.num_rows
            for batch in file.iter_batches(PARQUET_ROWS, columns=[column], use_threads=False):
                options.on_read(size * len(batch) // rows)
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield from as_document(f"{path}:{row}", text or "", options)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read as Parquet after row {row} ({first_line(error)})") from None


def check_column(column: str, schema: pyarrow.Schema, where: str, setting: str = "config.data.text_column") -> None:
    """Raises `UserError` unless a column of a table is text.

    Args:
      column: the name of the column.
      schema: the schema of the table.
      where: the table, for the message.
      setting: the config field that names the column.
    """
    texts = [field.name for field in schema if str(field.type) in ("string", "large_string")]
    if column in texts:
        return
    fault = (
        f"has the type {schema.field(column).type} in this column, not text"
        if column in schema.names
        else "has no such column"
    )
    remedy = f"columns with text: {', '.join(texts) or 'none of ' + ', '.join(schema.names)}"
    if texts and setting == "config.data.text_column":
        remedy += f"; set --{setting}={texts[0]}"
    raise UserError(f"{setting} = {column!r}: {where} {fault}; {remedy}")


def as_document(source: str, text: str, options: ReadOptions) -> Iterator[Document]:
    """Yields a text as a document unless it is blank or too long."""
    if len(text) > MAX_DOCUMENT_CHARACTERS:
        options.on_bad(f"{source}: a document of more than {MAX_DOCUMENT_CHARACTERS:,} characters")
    elif lines := [line for part in text.splitlines() if (line := part.strip())]:
        yield Document(source, lines)
    else:
        options.count("empty_documents")
