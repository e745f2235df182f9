"""Fingerprints of the files that examples are read from: a run knows its data by them."""

import contextlib
import contextvars
import hashlib
from collections.abc import Iterable, Iterator, Mapping

from etils import epath

from bertjax.common.files import persistently

PIECE_BYTES = 1 << 20
_noted: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("noted", default=None)


@contextlib.contextmanager
def noted() -> Iterator[dict[str, str]]:
    """Collects, by path, the fingerprints of the files that are read meanwhile, whichever task reads them."""
    found: dict[str, str] = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note(path: epath.PathLike) -> None:
    """Says that a file is read."""
    if (found := _noted.get()) is not None:
        found[str(path)] = of_file(path)


def note_set(name: str, version: str) -> None:
    """Says that a data set is read which its version, with its sizes, identifies."""
    if (found := _noted.get()) is not None:
        found[name] = hashlib.sha256(version.encode()).hexdigest()[:16]


@persistently
def of_file(path: epath.PathLike) -> str:
    """Returns a hash of the content of a file."""
    digest = hashlib.sha256()
    with epath.Path(path).open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()[:16]


def named_in(folder: str, found: Mapping[str, str]) -> dict[str, str]:
    """Returns fingerprints by the names that files have in a folder, which may be moved."""
    prefix = folder.rstrip("/") + "/"
    return {path.removeprefix(prefix): fingerprint for path, fingerprint in sorted(found.items())}


def of_files(folder: str, names: Iterable[str]) -> dict[str, str]:
    """Returns the fingerprints of those of the files that are there, in a folder or where their names say."""
    found = {}
    for name in names:
        paths = epath.Path(folder) / name, epath.Path(name)
        if path := next((path for path in paths if path.is_file()), None):
            found[name] = of_file(path)
    return found
