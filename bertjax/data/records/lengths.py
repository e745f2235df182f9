"""The lengths of records in tokens. Packing requires the lengths of a window before it reads the records.

Preparation writes files of lengths with the records. For other records, the lengths are measured once and cached.
"""

import concurrent.futures
import hashlib
from collections.abc import Mapping, Sequence

import google_crc32c
import numpy as np
import tqdm
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_whole, write_whole
from bertjax.data.records import layouts
from bertjax.data.records.integrity import IO_THREADS, read_record_blocks
from bertjax.data.records.layouts import Format

LENGTH = np.dtype("<u2")
CHECKSUM = "lengths_crc32c"  # field of `manifest.FileEntry`


def path_of(records: epath.PathLike) -> epath.Path:
    """Returns the path of the file that contains the lengths of a file of records."""
    return epath.Path(records).with_suffix(".lengths")


def write_lengths(records: epath.PathLike, lengths: np.ndarray) -> dict[str, int]:
    """Writes the lengths `[records]` of a file of records. Returns {`CHECKSUM`: checksum} for the manifest."""
    content = lengths.astype(LENGTH).tobytes()
    write_whole(path_of(records), content)
    return {CHECKSUM: google_crc32c.value(content)}


def read_lengths(files: Mapping[str, Mapping]) -> np.ndarray | None:
    """Reads the lengths of the records of files.

    Args:
      files: {path: `manifest.FileEntry`}.

    Returns:
      The concatenated lengths of all files, `[records]`; None if the manifest has no checksums of lengths.

    Raises:
      UserError: if a file of lengths is missing or damaged.
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
    is_complete = len(content) == entry["records"] * LENGTH.itemsize
    if google_crc32c.value(content) != entry[CHECKSUM] or not is_complete:
        raise UserError(f"{path}: differs from the manifest; copy it again, or prepare the records again")
    return np.frombuffer(content, LENGTH)


def measure_lengths(
    paths: Sequence[str], counts: Sequence[int], form: Format, cache: epath.PathLike | None
) -> np.ndarray:
    """Measures the lengths of the records of files.

    Args:
      paths: the files.
      counts: the number of records of each file.
      form: the format of the records.
      cache: a folder that stores the lengths for later calls; None for no cache.

    Returns:
      The concatenated lengths of all files, `[records]`.
    """
    measured = []
    for path, count in tqdm.tqdm(list(zip(paths, counts)), "measuring records", disable=None, leave=False):
        file = epath.Path(path).stat()
        identity = f"{path} {file.length} {file.mtime} {count}"
        cached = epath.Path(cache) / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.lengths" if cache else None
        if cached is not None and cached.exists() and cached.stat().length == count * LENGTH.itemsize:
            measured.append(np.frombuffer(read_whole(cached), LENGTH))
            continue
        lengths = _measure(path, count, form)
        measured.append(np.maximum(lengths, 1))
        if cached is not None and lengths.all():
            write_whole(cached, lengths.tobytes())
    return np.concatenate(measured)


def _measure(path: str, count: int, form: Format) -> np.ndarray:
    """Returns the lengths of the records of a file; 0 for damaged records, which are reported in training."""
    lengths = np.zeros(count, LENGTH)
    for block in read_record_blocks(path, count):
        for numbers, batch in layouts.parse_valid(block, form):
            lengths[numbers] = batch["segments"].sum(1)
    return lengths
