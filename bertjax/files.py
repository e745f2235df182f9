"""Writes files atomically."""

import contextlib
import uuid
from collections.abc import Iterator

from etils import epath

from bertjax.config import UserError


@contextlib.contextmanager
def replacing(path: epath.PathLike) -> Iterator[epath.Path]:
    """Gives a temporary name to write to, and renames it at the end, so that readers never see a partial file.

    Raises `UserError` if the file cannot be written, such as on a full disk.
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


def write_whole(path: epath.PathLike, content: str | bytes) -> None:
    """Writes a file at once, and the folders that it is in."""
    epath.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
