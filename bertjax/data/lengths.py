"""The lengths of records in tokens, which packing needs before it reads them: written beside them, or measured once."""

import concurrent.futures
import hashlib
from collections.abc import Mapping, Sequence

import google_crc32c
import numpy as np
import tqdm
from etils import epath

from bertjax.config import UserError
from bertjax.data import layouts
from bertjax.data.faults import IO_THREADS
from bertjax.data.layouts import Format
from bertjax.files import write_whole

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
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); copy it with the records") from None
    if google_crc32c.value(content) != entry[CHECKSUM]:
        raise UserError(f"{path}: is not what the manifest says; copy it again, or prepare the records again")
    return np.frombuffer(content, LENGTH)


def measure(paths: Sequence[str], counts: Sequence[int], form: Format, cache: epath.PathLike | None) -> np.ndarray:
    """Measures the records of files, given with their numbers; keeps the lengths of each file in the folder `cache`."""
    found = []
    for path, count in tqdm.tqdm(list(zip(paths, counts)), "measuring records", disable=None, leave=False):
        identity = f"{path} {epath.Path(path).stat().length} {count}"
        kept = epath.Path(cache) / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.lengths" if cache else None
        if kept is not None and kept.exists() and kept.stat().length == count * LENGTH.itemsize:
            found.append(np.frombuffer(kept.read_bytes(), LENGTH))
            continue
        found.append(_measure(path, count, form))
        if kept is not None:
            write_whole(kept, found[-1].tobytes())
    return np.concatenate(found)


def _measure(path: str, count: int, form: Format) -> np.ndarray:
    """The lengths of a file's records; from the first that cannot be read, which training will find, all are 1."""
    from bertjax.data.tf import tf

    def length(records):
        return tf.reduce_sum(layouts.parse(records, form)["input_mask"], 1)

    found = tf.data.TFRecordDataset(path, buffer_size=1 << 22).batch(4096).map(length, tf.data.AUTOTUNE)
    lengths = np.ones(count, LENGTH)
    first = 0
    try:
        for some in found.as_numpy_iterator():
            lengths[first : first + len(some)] = some
            first += len(some)
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError):
        pass
    return np.maximum(lengths, 1)
