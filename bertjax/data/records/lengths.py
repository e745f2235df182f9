"""The lengths of records in tokens, which packing needs before it reads them: written beside them, or measured once."""

import concurrent.futures
import hashlib
import itertools
from collections.abc import Mapping, Sequence

import google_crc32c
import numpy as np
import tqdm
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_whole, write_whole
from bertjax.data.records import layouts
from bertjax.data.records.integrity import BLOCK, IO_THREADS
from bertjax.data.records.layouts import Format
from bertjax.data.records.parsing import Unfit
from bertjax.data.records.serialization import read_tfrecords

LENGTH = np.dtype("<u2")
CHECKSUM = "lengths_crc32c"  # in a file's entry in the manifest


def path_of(records: epath.PathLike) -> epath.Path:
    return epath.Path(records).with_suffix(".lengths")


def write(records: epath.PathLike, lengths: np.ndarray) -> dict[str, int]:
    """Writes the lengths `[records]` of a file of records; returns their checksum for its entry in the manifest."""
    content = lengths.astype(LENGTH).tobytes()
    write_whole(path_of(records), content)
    return {CHECKSUM: google_crc32c.value(content)}


def read(files: Mapping[str, Mapping]) -> np.ndarray | None:
    """Reads the lengths of files, given with their entries in the manifest; None if it knows none.

    Raises `UserError` if they are missing or damaged.
    """
    if not all(CHECKSUM in entry for entry in files.values()):
        return None
    with concurrent.futures.ThreadPoolExecutor(IO_THREADS) as pool:
        return np.concatenate(list(pool.map(_read, files, files.values())))


def _read(records: str, entry: Mapping) -> np.ndarray:
    path = path_of(records)
    try:
        content = read_whole(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); copy it with the records") from None
    is_of_all = len(content) == entry["records"] * LENGTH.itemsize
    if google_crc32c.value(content) != entry[CHECKSUM] or not is_of_all:
        raise UserError(f"{path}: is not what the manifest says; copy it again, or prepare the records again")
    return np.frombuffer(content, LENGTH)


def measure(paths: Sequence[str], counts: Sequence[int], form: Format, cache: epath.PathLike | None) -> np.ndarray:
    """Measures the records of files, given with their numbers; keeps the lengths of each file in the folder `cache`."""
    found = []
    for path, count in tqdm.tqdm(list(zip(paths, counts)), "measuring records", disable=None, leave=False):
        file = epath.Path(path).stat()
        identity = f"{path} {file.length} {file.mtime} {count}"
        kept = epath.Path(cache) / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.lengths" if cache else None
        if kept is not None and kept.exists() and kept.stat().length == count * LENGTH.itemsize:
            found.append(np.frombuffer(read_whole(kept), LENGTH))
            continue
        lengths = _measure(path, count, form)
        found.append(np.maximum(lengths, 1))
        if kept is not None and lengths.all():
            write_whole(kept, lengths.tobytes())
    return np.concatenate(found)


def _measure(path: str, count: int, form: Format) -> np.ndarray:
    """The lengths of a file's records; 0 for those that cannot be read, which training will find."""
    lengths = np.zeros(count, LENGTH)
    with epath.Path(path).open("rb") as file:
        found = enumerate(itertools.islice(read_tfrecords(file), count))
        while block := list(itertools.islice(found, BLOCK)):
            readable = {number: record for number, record in block if record is not None}
            lengths[list(readable)] = _lengths(list(readable.values()), form)
    return lengths


def _lengths(records: list[bytes], form: Format) -> list[int]:
    try:
        return layouts.parse(records, form)["segments"].sum(1).tolist() if records else []
    except Unfit:
        half = len(records) // 2
        return _lengths(records[:half], form) + _lengths(records[half:], form) if half else [0]
