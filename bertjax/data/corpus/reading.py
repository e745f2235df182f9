"""Reads documents from .txt, .jsonl, .json and .parquet files: files, folders or globs, also on gs:// and s3://."""

import bz2
import collections
import dataclasses
import functools
import glob
import lzma
import os
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
from bertjax.common.files import parse_texts

# One per stream of a file, which may have several. The libraries' file objects do not serve: python-zstandard's ends
# quietly on an unfinished frame, lzma's at whatever follows the first stream and is none.
DECOMPRESSORS = {
    ".gz": lambda: zlib.decompressobj(wbits=31),  # gzip's format, with its checksum
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj(),  # the most that zstd writes
}
SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
BEGINNINGS = {  # first bytes of files that are no text, after decompression
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
MOST_SNIFFED = 64  # first bytes, of which a text has hardly any zeros
MAX_DOCUMENT_CHARACTERS = 20_000_000  # workers hold whole documents; the longest books have a quarter of that
MAX_LINE_BYTES = 8 * MAX_DOCUMENT_CHARACTERS  # such as a JSON object with a document and other fields
READABLE = "supported are .txt, .jsonl and .json (JSON lines), plain or as .gz, .bz2, .xz, .zst, and .parquet"
TO_JSON_LINES = "write an object with the text in each line, with jq -c '.[]' for an array"
HIDDEN, NO_SUFFIX = "hidden", "without a suffix"  # kinds of files that are not read, besides their suffixes
REMEDIES = {  # by kind; other kinds, such as images, have none
    **dict.fromkeys((NO_SUFFIX, ".md", ".rst", ".text", ".tex", ".log"), "rename text to .txt"),
    **dict.fromkeys((".ndjson", ".jsonlines", ".jl"), "rename to .jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "write as .jsonl, or name hf:FOLDER"),
    **dict.fromkeys((".html", ".htm", ".xml", ".pdf", ".docx", ".epub"), "extract the text to .txt"),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z"), "unpack first"),
    ".arrow": "write as .parquet",
    "folder": "name folders by themselves, or write ** in the pattern",
}
NAMED, NAMED_KINDS = 3, 4  # how many files, and kinds of files, are named
PARQUET_ROWS = 64  # rows read at a time
CHUNK_BYTES = 1 << 18  # bytes read at a time
REQUEST_SECONDS = 120  # a request to gs:// is repeated for so long; the library's own limit is 15 minutes


@dataclasses.dataclass(frozen=True)
class Document:
    """Consecutive text. `lines` are its paragraphs or sentences; `source` is its location for messages, "FILE:LINE"."""

    source: str
    lines: list[str]


class File(NamedTuple):
    path: str
    size: int  # in bytes, as stored
    modified: int  # local: ns since 1970; remote: s, of which a listing and a single file tell the same; 0: unknown


SKIP = "mend it, or leave out such documents with --config.data.on_bad_document=skip"


def stop_at(fault: str, remedy: str = SKIP) -> None:
    """Stops at a document that cannot be used."""
    raise UserError(f"{fault}; {remedy}")


@dataclasses.dataclass(frozen=True)
class Reading:
    """How text is read.

    Attributes:
      text_column: the field of .jsonl and the column of .parquet files that has the text.
      document: what a document of .txt files is: text that ends at a blank_line, a file, or a line.
      on_bad: called with what is wrong with a document, "FILE:LINE: ...", and perhaps with a remedy other than `SKIP`.
        If it returns, the document is left out.
      on_read: called with the number of bytes of each piece that has been read, as stored.
      count: called with "files" for each file that has documents, "empty_files" for each other, "empty_documents" for
        each document without text, and with "skipped_files", path and fault for each .json that is no JSON lines.
    """

    text_column: str = "text"
    document: str = "blank_line"
    on_bad: Callable[..., None] = stop_at
    on_read: Callable[[int], None] = lambda size: None
    count: Callable[..., None] = lambda what, *details: None


DEFAULT = Reading()


def read_file(path: str, how: Reading = DEFAULT) -> Iterator[Document]:
    """Yields the documents of a file. Raises `UserError` with file and line if it is damaged, cut off, or no text."""
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".json": _read_jsonl, ".parquet": _read_parquet}
    suffix, document = _suffixes(path)[0], None
    if suffix == ".json" and (fault := _fault_of_json(path, how)):
        how.count("skipped_files", path, fault)
        return
    for document in readers[suffix](path, how):
        yield document
    how.count("files" if document else "empty_files")


def _fault_of_json(path: str, how: Reading) -> str:
    """Returns why a .json file is not read: its first line is no object with a text; "" if the file is read."""
    quiet = Reading(on_bad=lambda *_: None)
    line = next((line for _, line in read_lines(path, quiet) if line is None or line.strip()), None)
    if line is None:  # `_read_jsonl` names a line that is too long or no text
        return ""
    try:
        found = parse_texts(line, dict[str, Any])
    except ValueError:
        is_array = line.lstrip().startswith("[")
        return f"{'one JSON array' if is_array else 'no JSON lines'}; {TO_JSON_LINES}"
    if how.text_column in found:
        return ""
    return f'no "{how.text_column}" in the first line, but {", ".join(found) or "nothing"}; set data.text_column'


class Listing(NamedTuple):
    """The files of a source: those that are read, and the paths of the others, each sorted."""

    files: list[File]
    others: list[str]


def list_files(source: str) -> Listing:
    """Lists the corpus files of a file, a folder (recursively) or a glob, and the files there that are not read.

    Raises `UserError` if there are no corpus files, or if a folder or a link cannot be followed.
    """
    try:
        files, others = (_find_remote if "://" in source else _find_local)(source)
    except FileNotFoundError as error:
        missing = error.filename if isinstance(error.filename, str) and "://" not in source else source  # a link's end
        raise UserError(f"data.corpus: no file or folder {missing!r}") from None
    except (OSError, pyarrow.ArrowException, ImportError, ValueError, NotImplementedError) as error:
        raise UserError(f"data.corpus: {source!r} cannot be listed ({first_line(error)})") from None
    if not files:
        there = describe_kinds(kinds_of(source, others))
        raise UserError(f"data.corpus: no text files in {source!r}{f', but {there}' if there else ''}; {READABLE}")
    for file in files:  # manifests and messages name the files
        if file.path != surrogates.replaced(file.path):
            raise UserError(f"data.corpus: the name of {os.fsencode(file.path)!r} is not UTF-8; rename the file")
    return Listing(sorted(files), sorted(others))


Kinds = dict[str, tuple[int, list[str]]]  # kind of a file -> how many there are, and the names of the first ones


def kinds_of(source: str, paths: Iterable[str]) -> Kinds:
    """Returns the kinds of files that are not read: their suffix, `NO_SUFFIX`, `HIDDEN` or "folder"."""
    start = os.path.join(source, "") if not _is_pattern(source) else os.path.dirname(re.split(r"[*?[]", source)[0])
    by_kind = collections.defaultdict(list)
    for path in sorted(paths):
        name = path.removeprefix(start).lstrip("/")
        by_kind[_kind_of(name)].append(printable(name))
    return {kind: (len(names), names[:NAMED]) for kind, names in sorted(by_kind.items(), key=lambda x: -len(x[1]))}


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
    for remedy, alike in by_remedy.items():
        count = sum(kinds[kind][0] for kind in alike)
        names = [name for kind in alike for name in kinds[kind][1]][:NAMED]
        named = f" ({', '.join(names)}{', ...' if count > len(names) else ''})"
        more = ", ..." if len(alike) > NAMED_KINDS else ""
        parts.append(f"{count:,} {', '.join(alike[:NAMED_KINDS])}{more}{named}{f': {remedy}' if remedy else ''}")
    return "; ".join(parts)


def _remedy(kind: str) -> str:
    return REMEDIES.get(kind) or REMEDIES.get(os.path.splitext(kind)[0], "")


def printable(name: str) -> str:
    """Returns the name of a file without line ends, and without bytes that are no UTF-8."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def file_at(path: str) -> File:
    """Returns what is at a path now. Raises `UserError` if it is no file."""
    try:
        if "://" not in path:
            found = os.stat(path)
            return File(path, found.st_size, found.st_mtime_ns)
        filesystem, inner = _filesystem_of(path)
        info = filesystem.get_file_info(inner)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError("no such file")
        return File(path, info.size or 0, _seconds(info.mtime))
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read ({first_line(error)})") from None


def _find_local(source: str) -> tuple[list[File], list[str]]:
    if _is_pattern(source) and not os.path.exists(source):
        found = sorted(glob.glob(source, recursive=True))
        folders = {path for path in found if os.path.isdir(path)}
        paths = [path for path in found if path not in folders]
        others = [path for path in paths if not _is_text(path)]
        read_from = {parent for path in paths for parent in _parents(path)}
        others += [f"{path}/" for path in folders if path.rstrip("/") not in read_from]
        return [file_at(path) for path in paths if _is_text(path)], others
    if os.path.isdir(source):
        files, others = [], []
        for entry in _walk(source.rstrip("/") or "/"):
            if _is_text(entry.name):
                found = entry.stat()
                files.append(File(entry.path, found.st_size, found.st_mtime_ns))
            else:
                others.append(entry.path)
        return files, others
    os.stat(source)
    return [file_at(_named(source))], []


def _parents(path: str) -> Iterator[str]:
    while path := os.path.dirname(path.rstrip("/")).rstrip("/"):
        yield path


def _walk(folder: str) -> Iterator[os.DirEntry]:
    """Yields the files in a folder and the folders in it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _walk(entry.path)
            else:
                yield entry


def _find_remote(source: str) -> tuple[list[File], list[str]]:
    filesystem, inner = _filesystem_of(source)
    # Prepended to a path in the file system, it gives the path as the user writes it.
    prefix = source.rstrip("/").removesuffix(inner.lstrip("/"))
    info = filesystem.get_file_info(inner)
    if info.type == fs.FileType.File:
        return [file_at(_named(source))], []
    folder, pattern = inner, None
    if info.type != fs.FileType.Directory:
        if not _is_pattern(source):
            raise FileNotFoundError
        # Folders on gs:// need not exist to have files, so there is no going down from one to the next.
        folder, pattern = re.split(r"/[^/]*[*?[]", inner)[0], re.compile(glob_translate(inner))
    infos = filesystem.get_file_info(fs.FileSelector(folder, recursive=True))
    infos = [info for info in infos if info.type != fs.FileType.Directory and (not pattern or pattern.match(info.path))]
    return [
        File(prefix + info.path.lstrip("/"), info.size or 0, _seconds(info.mtime))
        for info in infos
        if _is_text(info.path)
    ], [prefix + info.path.lstrip("/") for info in infos if not _is_text(info.path)]


def _filesystem_of(path: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a URL, and the path in it."""
    scheme, _, rest = path.partition("://")
    authority, _, rest = rest.partition("/")
    filesystem, inner = _connect(scheme, authority)
    return filesystem, f"{inner}/{rest}".rstrip("/")


@functools.cache
def _connect(scheme: str, authority: str) -> tuple[fs.FileSystem, str]:
    url = f"{scheme}://{authority}"
    try:
        return fs.FileSystem.from_uri(f"{url}?retry_limit_seconds={REQUEST_SECONDS}" if scheme == "gs" else url)
    except pyarrow.ArrowInvalid:  # none of pyarrow's
        filesystem, inner = fsspec.url_to_fs(url)
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), inner


def _seconds(modified) -> int:
    return int(modified.timestamp()) if modified else 0


def _is_pattern(source: str) -> bool:
    return any(character in source for character in "*?[")


def _named(source: str) -> str:
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
    """Returns whether `Reading.document` divides a file into documents."""
    return _suffixes(path)[0] == ".txt"


def first_line(error: Exception) -> str:
    """Returns the first line of what an error says; libraries' messages may have many."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


def _open(path: str, seekable: bool = False) -> BinaryIO:
    if "://" not in path:
        return open(path, "rb")
    filesystem, inner = _filesystem_of(path)
    return filesystem.open_input_file(inner) if seekable else filesystem.open_input_stream(inner, compression=None)


def read_lines(path: str, how: Reading) -> Iterator[tuple[int, str | None]]:
    """Yields (line number from 1, line without its line ending), decompressed and decoded.

    Yields None for a line that is no text, after `how.on_bad`.
    """
    compression = _suffixes(path)[1]
    number = 0
    try:
        with _open(path) as file:
            chunks = _read_chunks(file, how.on_read)
            lines = _split_lines(_decompress(chunks, compression) if compression else chunks)
            for number, line in enumerate(lines, 1):
                if number == 1:
                    _check_beginning(path, line or b"")
                yield number, _decoded(path, number, line, how)
    except EOFError:
        raise UserError(f"{path}: cut off after line {number}; download or compress it again") from None
    except (lzma.LZMAError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(
            f"{path}: damaged after line {number}, or not {compression} ({error}); download or compress it again"
        ) from None
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path}: cannot be read after line {number} ({first_line(error)})") from None


def _check_beginning(path: str, content: bytes) -> None:
    """Raises `UserError` if a file begins as one of another format does."""
    for beginning, what in BEGINNINGS.items():
        if content.startswith(beginning):
            within = f"what is in it is {what}" if _suffixes(path)[1] else f"it is {what}, which its name does not say"
            raise UserError(f"{path}: not text: {within}; {READABLE}")
    if 4 * content[:MOST_SNIFFED].count(0) > len(content[:MOST_SNIFFED]):
        raise UserError(f"{path}: not text: UTF-16 (convert it with iconv -f utf-16le -t utf-8), or binary; {READABLE}")


def _decoded(path: str, number: int, line: bytes | None, how: Reading) -> str | None:
    if line is None:
        how.on_bad(f"{path}:{number}: a line of more than {MAX_LINE_BYTES:,} bytes")
        return None
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        how.on_bad(
            f"{path}:{number}: byte {error.start + 1} of the line, 0x{bad:02x}, is not UTF-8 (to convert a whole "
            f"file: iconv -f latin1 -t utf-8)"
        )
        return None


def _read_chunks(file: BinaryIO, on_read: Callable) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        on_read(len(chunk))
        yield chunk


def _decompress(chunks: Iterable[bytes], compression: str) -> Iterator[bytes]:
    """Yields the content of a file's streams, one after the other. Raises `EOFError` if the last one is cut off."""
    new = DECOMPRESSORS[compression]
    stream = new()  # None between streams, where a file may be padded with zeros
    for chunk in chunks:
        while chunk := chunk if stream else chunk.lstrip(b"\0"):
            stream = stream or new()
            yield stream.decompress(chunk)
            chunk, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
    if stream:
        raise EOFError


def _split_lines(chunks: Iterable[bytes]) -> Iterator[bytes | None]:
    """Yields lines; None for each of more than `MAX_LINE_BYTES`."""
    parts, size = [], 0  # parts and size of the line that has not ended
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        size += len(first)
        parts = [*parts, first] if size <= MAX_LINE_BYTES else []
        if others:
            yield b"".join(parts) if size <= MAX_LINE_BYTES else None
            yield from others[:-1]
            parts, size = others[-1:], len(others[-1])
    if size:
        yield b"".join(parts) if size <= MAX_LINE_BYTES else None


def _read_txt(path: str, how: Reading) -> Iterator[Document]:
    """Yields the documents of a text file, which end where `how.document` says."""
    lines, start, characters, is_bad = [], 1, 0, False

    def end() -> Iterator[Document]:
        nonlocal lines, is_bad
        if lines and not is_bad:
            yield Document(f"{path}:{start}", lines)
        lines, is_bad = [], False

    for number, line in read_lines(path, how):
        text = line and line.strip()
        is_bad = is_bad or line is None
        if text and not is_bad:
            if not lines:
                start, characters = number, 0
            lines.append(text)
            characters += len(text)
            if characters > MAX_DOCUMENT_CHARACTERS:
                how.on_bad(
                    f"{path}:{start}: a document of more than {MAX_DOCUMENT_CHARACTERS:,} characters, which ends with "
                    f"a {how.document.replace('_', ' ')} (config.data.document)"
                )
                lines, is_bad = [], True
        if how.document == "line" or (how.document == "blank_line" and text == ""):
            yield from end()
    yield from end()


def _read_jsonl(path: str, how: Reading) -> Iterator[Document]:
    """Yields a field of the object in each line as a document."""
    field, has_field = how.text_column, False
    for number, line in read_lines(path, how):
        if line is None or not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            found = parse_texts(line, dict[str, Any])
        except ValueError:
            how.on_bad(f"{where}: not a JSON object: {line[:60]!r}")
            continue
        text = found.get(field)
        has_field = has_field or (field in found and isinstance(text, str | None))
        if isinstance(text, str):
            yield from as_document(where, text, how)
            continue
        if field in found:
            kind = "null" if text is None else type(text).__name__
            fault = f'{where}: "{field}" (config.data.text_column) is {kind}, not a string'
        else:
            fault = f'{where}: no "{field}" (config.data.text_column) among {", ".join(found) or "its no fields"}'
        texts = {name: value for name, value in found.items() if isinstance(value, str) and value.strip()}
        if has_field or not texts:
            how.on_bad(fault)
        else:  # all documents of the file seem to have their text in another field; skipping would leave them out
            names = sorted(texts, key=lambda name: -len(texts[name]))
            how.on_bad(fault, f"fields with text: {', '.join(names)}; set --config.data.text_column={names[0]}")


def _read_parquet(path: str, how: Reading) -> Iterator[Document]:
    """Yields the texts of a column as documents, `PARQUET_ROWS` at a time."""
    from pyarrow import parquet

    row, column = 0, how.text_column
    try:
        with _open(path, seekable=True) as raw:
            # By default it reads the column of a row group whole, which may be the whole file.
            file = parquet.ParquetFile(raw, page_checksum_verification=True, buffer_size=CHUNK_BYTES, pre_buffer=False)
            check_column(column, file.schema_arrow, path)
            size, rows = file_at(path).size, file.metadata.num_rows
            for batch in file.iter_batches(PARQUET_ROWS, columns=[column], use_threads=False):
                how.on_read(size * len(batch) // rows)
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield from as_document(f"{path}:{row}", text or "", how)
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path}: cannot be read as Parquet after row {row} ({first_line(error)})") from None


def check_column(column: str, schema: pyarrow.Schema, where: str, setting: str = "config.data.text_column") -> None:
    """Raises `UserError` unless a table has text in the column that this setting names."""
    texts = [field.name for field in schema if str(field.type) in ("string", "large_string")]
    if column in texts:
        return
    fault = f"has {schema.field(column).type} there, not text" if column in schema.names else "has no such column"
    remedy = f"columns with text: {', '.join(texts) or 'none of ' + ', '.join(schema.names)}"
    if texts and setting == "config.data.text_column":
        remedy += f"; set --{setting}={texts[0]}"
    raise UserError(f"{setting} = {column!r}: {where} {fault}; {remedy}")


def as_document(source: str, text: str, how: Reading) -> Iterator[Document]:
    """Yields a text as a document, if it has lines that are not blank, and is not too long."""
    if len(text) > MAX_DOCUMENT_CHARACTERS:
        how.on_bad(f"{source}: a document of more than {MAX_DOCUMENT_CHARACTERS:,} characters")
    elif lines := [line for part in text.splitlines() if (line := part.strip())]:
        yield Document(source, lines)
    else:
        how.count("empty_documents")
