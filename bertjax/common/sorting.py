"""Files with rows in the order of a key. A range of keys can be read from many files without reading the rest.

Random keys shuffle the rows: the rows of a range, from all files and in the order of the keys, are a random part of all
rows in random order. Hashes as keys place equal rows side by side.
"""

import concurrent.futures
import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.common.files import persistently, replacing
from bertjax.common.workers import in_order

KEY = np.dtype(np.uint64)
ROWS = 4096  # rows copied at a time
READ_TOGETHER = 256  # the largest number of files that are read together
MERGED_BYTES = 32 << 20  # the bytes of rows that a merge holds in memory


@persistently
def write_run(path: str, keys: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    """Writes a file with rows in the order of their keys.

    Args:
      path: the path of the file.
      keys: the keys of the rows, uint64 `[rows]`.
      parts: arrays whose concatenation is the rows.
    """
    order = np.argsort(keys, kind="stable")
    ends = np.cumsum([len(part) for part in parts])
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(keys[order].data)
        for first in range(0, len(order), ROWS):
            rows = order[first : first + ROWS]
            sorted_rows = np.empty(len(rows), parts[0].dtype)
            owners = np.searchsorted(ends, rows, "right")
            for owner in np.unique(owners):
                is_of_part = owners == owner
                sorted_rows[is_of_part] = parts[owner][rows[is_of_part] - (ends[owner] - len(parts[owner]))]
            file.write(sorted_rows.data)


class Mapped(NamedTuple):
    """A file that is mapped into memory: ascending keys `[rows]`, and the rows."""

    keys: np.ndarray
    rows: np.ndarray

    def range(self, index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys and the rows of the range `index` of `count` equal ranges of all possible keys."""
        place = slice(_place(self.keys, index, count), _place(self.keys, index + 1, count))
        return np.array(self.keys[place]), np.array(self.rows[place])


def map_sorted_run(path: str, row: np.dtype) -> Mapped:
    """Maps a file of `write_run` into memory; `row` is the type of its rows."""
    total = os.path.getsize(path) // (KEY.itemsize + row.itemsize)
    if not total:  # an empty file cannot be mapped
        return Mapped(np.empty(0, KEY), np.empty(0, row))
    content = np.memmap(path, np.uint8, "r")
    return Mapped(content[: total * KEY.itemsize].view(KEY), content[total * KEY.itemsize :].view(row))


def _place(keys: np.ndarray, index: int, count: int) -> int:
    """Returns the position in ascending keys where the range `index` begins."""
    return len(keys) if index == count else int(np.searchsorted(keys, np.uint64((index << 64) // count)))


def divide(keys: np.ndarray, count: int) -> Iterator[tuple[int, slice]]:
    """Yields the ranges that contain some of the ascending `keys`, with the positions of these keys."""
    bounds = np.array([(index << 64) // count for index in range(1, count)], np.uint64)
    indices, first = np.unique(np.searchsorted(bounds, keys, "right"), return_index=True)
    for index, start, end in zip(indices.tolist(), first.tolist(), [*first[1:].tolist(), len(keys)]):
        yield index, slice(start, end)


def gather(paths: Iterable[str], row: np.dtype, index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and the rows of a range from all files, in the order of the keys."""
    return merge_parts((map_sorted_run(path, row).range(index, count) for path in paths), row)


def merge_until_few(paths: Sequence[str], row: np.dtype, pool: concurrent.futures.Executor, ahead: int) -> list[str]:
    """Merges neighbouring files until `READ_TOGETHER` files are left, deletes the parts, and returns the paths.

    The name of a merged file is derived from the names of its parts. After a process was killed, the same call resumes
    the merge.
    """
    left, levels = list(paths), []
    while len(left) > READ_TOGETHER:
        parts = [tuple(left[first : first + READ_TOGETHER]) for first in range(0, len(left), READ_TOGETHER)]
        left = [_merged_path(part) for part in parts]
        levels.append(list(zip(left, parts)))
    needed, missing = set(left), []
    for level in reversed(levels):  # the parts of a merged file may be deleted
        missing.append([(path, parts) for path, parts in level if path in needed and not os.path.exists(path)])
        needed = {part for _, parts in missing[-1] for part in parts}
    for merges in reversed(missing):
        for _ in in_order(pool, functools.partial(_merge_files, row=row), merges, ahead):
            pass
    return left


def _merged_path(parts: Sequence[str]) -> str:
    names = "\n".join(map(os.path.basename, parts))
    return os.path.join(os.path.dirname(parts[0]), f"merged-{hashlib.sha256(names.encode()).hexdigest()[:32]}")


@persistently
def _merge_files(merged: tuple[str, Sequence[str]], row: np.dtype) -> None:
    path, parts = merged
    runs = [map_sorted_run(part, row) for part in parts]
    total = sum(len(run.keys) for run in runs)
    count = 1 + total * row.itemsize // MERGED_BYTES
    with replacing(path) as partial, partial.open("wb") as file:
        written = 0
        for index in range(count):
            keys, rows = merge_parts((run.range(index, count) for run in runs), row)
            for first, array in ((KEY.itemsize * written, keys), (KEY.itemsize * total + row.itemsize * written, rows)):
                file.seek(first)
                file.write(array.data)
            written += len(keys)
    for part in parts:
        os.unlink(part)


def merge_parts(parts: Iterable[tuple[np.ndarray, np.ndarray]], row: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and the rows of all parts in the order of the keys, and equal keys in the order of the parts."""
    all_keys, all_rows = zip((np.empty(0, KEY), np.empty(0, row)), *parts)
    keys = np.concatenate(all_keys)
    order = np.argsort(keys, kind="stable")
    return keys[order], np.concatenate(all_rows)[order]
