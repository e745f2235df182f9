"""Fingerprints of the files with training examples. The fingerprints identify the data of a run."""

import contextlib
import contextvars
import hashlib
from collections.abc import Iterable, Iterator, Mapping

from etils import epath

from bertjax.common.files import persistently

READ_BYTES = 1 << 20  # bytes read at a time
_collected: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("collected", default=None)


@contextlib.contextmanager
def collect() -> Iterator[dict[str, str]]:
    """Collects the fingerprints of all files that are read inside the `with` block, {path: fingerprint}."""
    collected: dict[str, str] = {}
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


def add_file(path: epath.PathLike) -> None:
    """Adds the fingerprint of a file inside a `collect` block. Readers of files call this."""
    if (collected := _collected.get()) is not None:
        collected[str(path)] = of_file(path)


def add_dataset(name: str, version: str) -> None:
    """Adds a data set to the collection; `version` identifies its content."""
    if (collected := _collected.get()) is not None:
        collected[name] = hashlib.sha256(version.encode()).hexdigest()[:16]


@persistently
def of_file(path: epath.PathLike) -> str:
    """Returns a hash of the content of a file."""
    digest = hashlib.sha256()
    with epath.Path(path).open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()[:16]


def relative_to(folder: str, by_path: Mapping[str, str]) -> dict[str, str]:
    """Returns fingerprints by the paths relative to a folder, so that the folder may be moved."""
    prefix = folder.rstrip("/") + "/"
    return {path.removeprefix(prefix): fingerprint for path, fingerprint in sorted(by_path.items())}


def of_files(folder: str, names: Iterable[str]) -> dict[str, str]:
    """Returns the fingerprints of existing files by their names; a name is a path, or relative to the folder."""
    by_name = {}
    for name in names:
        paths = epath.Path(folder) / name, epath.Path(name)
        if path := next((path for path in paths if path.is_file()), None):
            by_name[name] = of_file(path)
    return by_name
