"""Atomic files, files to append to, and JSON from untrusted sources.

Operations are retried after a temporary error of a network file system. The libraries of object stores retry
internally.
"""

import contextlib
import errno
import functools
import io
import sys
import time
import uuid
from collections.abc import Iterator
from typing import IO, Any, TypeVar

import msgspec
import tenacity
from etils import epath

from bertjax.common import surrogates
from bertjax.common.errors import UserError

T = TypeVar("T")

# Permanent errors: a full or read-only disk, a wrong path or permission.
LASTING = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.EEXIST,
    errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EPIPE,
}  # fmt: skip
ATTEMPTS, LONGEST_WAIT = 6, 8.0  # seconds: after 1, 2, 4, 8 and 8
READ_BYTES = 1 << 16  # bytes read at a time


def _is_temporary(error: BaseException) -> bool:
    cause = error.__context__ if isinstance(error, UserError) else error
    # The libraries of object stores raise these errors without an errno.
    lasting = (
        FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError,
        io.UnsupportedOperation,
    )  # fmt: skip
    return isinstance(cause, OSError) and not isinstance(cause, lasting) and cause.errno not in LASTING


persistently = tenacity.retry(
    retry=tenacity.retry_if_exception(_is_temporary),
    stop=tenacity.stop_after_attempt(ATTEMPTS),
    wait=tenacity.wait_exponential(max=LONGEST_WAIT),
    reraise=True,
)  # decorates a function that may be called again


def absolute(path: epath.PathLike) -> epath.Path:
    """Returns an absolute path. The path of an object store stays the same."""
    return epath.Path(path) if "://" in str(path) else epath.Path(path).absolute()


@persistently
def read_whole(path: epath.PathLike) -> bytes:
    """Reads a file at once."""
    return epath.Path(path).read_bytes()


class _PersistentReader(io.RawIOBase):
    """A file that is opened by the first read, and again at the same position after a temporary error."""

    def __init__(self, path: epath.PathLike) -> None:
        self._path, self._position = epath.Path(path), 0
        self._file: IO[bytes] | None = None

    def readable(self) -> bool:
        return True

    @persistently
    def readinto(self, buffer: Any) -> int:
        """Reads bytes into a buffer, and returns the number of bytes; 0 at the end of the file."""
        try:
            if self._file is None:
                self._file = self._path.open("rb")
                if self._position:  # A pipe cannot seek, and is read once.
                    self._file.seek(self._position)
            content = self._file.read(len(buffer))
        except OSError:
            self._close_file()
            raise
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def close(self) -> None:
        self._close_file()
        super().close()


def open_to_read(path: epath.PathLike) -> io.BufferedReader:
    """Opens a file that is read from its beginning to its end, and is too large for `read_whole`.

    The first read raises `OSError` if the file does not exist.
    """
    return io.BufferedReader(_PersistentReader(path), READ_BYTES)


def parse_json(text: str | bytes, kind: type[T] = Any) -> T:  # type: ignore[assignment]
    """Returns JSON as a value of a type, such as `dict[str, int]`. Raises `ValueError` with the fault."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise ValueError("nested too deep") from None


def parse_texts(line: str, kind: type[T] = Any) -> T:  # type: ignore[assignment]
    """As `parse_json`, for JSON with texts: replaces lone surrogates in the texts by U+FFFD."""
    try:
        return parse_json(line, kind)
    except ValueError:
        if (mended := surrogates.replaced_in_json(line)) == line:
            raise
        return parse_json(mended, kind)


def read_json(path: epath.PathLike, kind: type[T] = dict[str, Any], remedy: str = "copy it again") -> T:  # type: ignore[assignment]
    """Reads a JSON file as a value of a type. Raises `UserError` if the file is missing, or has another content."""
    path = epath.Path(path)
    try:
        return parse_json(read_whole(path).removeprefix(b"\xef\xbb\xbf"), kind)
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path}: no such file; correct the path, or copy the file") from None
    except ValueError as error:
        raise UserError(f"{path}: damaged, or not in the expected format ({error}); {remedy}") from None


def inside(folder: epath.Path, name: str, source: epath.PathLike) -> epath.Path:
    """Returns the path of a file that the file `source` names. Raises `UserError` for a path outside the folder."""
    if not name or name.startswith("/") or "\\" in name or "://" in name or "\0" in name or ".." in name.split("/"):
        raise UserError(f"{source}: the file name {name!r} must be the name of a file in {folder}; correct the name")
    return folder / name


@functools.lru_cache(maxsize=1000)  # The readers open a file several times; one note is enough.
def note(path: epath.PathLike, text: str) -> None:
    """Prints a note about a file once, to stderr, because stdout may contain data."""
    print(f"{path}: {text}", file=sys.stderr, flush=True)


def require_file_name(output: epath.PathLike) -> None:
    """Raises `UserError` if the file to write is a folder."""
    if epath.Path(output).is_dir():
        raise UserError(f"{output}: is a folder; name a file to write")


def require_new_folder(output: epath.PathLike) -> None:
    """Raises `UserError` if `--output` names a file, or a folder that is not empty."""
    output = epath.Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output={output}: exists and is not empty; name a new folder")


@contextlib.contextmanager
def replacing(path: epath.PathLike) -> Iterator[epath.Path]:
    """Context manager: yields a temporary path, and renames the file at the end: readers never read a partial file.

    Raises `UserError` if the file cannot be written, for example because the disk is full.
    """
    path = epath.Path(path)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.partial")  # unique per writer
    try:
        yield partial
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
        raise


@persistently
def write_whole(path: epath.PathLike, content: str | bytes) -> None:
    """Writes a file at once, and creates the folder of the file."""
    epath.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)


UPLOAD_SECONDS = 30  # between two uploads of the whole file to an object store


class GrowingFile:
    """A file to append to. Object stores cannot append: there, the whole file is uploaded every `UPLOAD_SECONDS`.

    Args:
      path: the path of the file.
      content: the content to begin with.
    """

    def __init__(self, path: epath.Path, content: bytes = b"") -> None:
        self._path, self._is_remote = path, "://" in str(path)
        self._content, self._size = content if self._is_remote else b"", len(content)
        self._uploaded = time.monotonic()
        if not path.exists() or read_whole(path) != content:
            write_whole(path, content)

    def write(self, more: bytes) -> None:
        """Appends bytes."""
        if not self._is_remote:
            try:
                with self._path.open("ab") as file:
                    file.write(more)
            except OSError:  # a part may have been written
                write_whole(self._path, read_whole(self._path)[: self._size] + more)
            self._size += len(more)
            return
        self._content += more
        if time.monotonic() - self._uploaded > UPLOAD_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Uploads the file if it is in an object store."""
        if self._is_remote:
            write_whole(self._path, self._content)
            self._uploaded = time.monotonic()
