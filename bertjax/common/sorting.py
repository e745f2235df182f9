"""Rows on disk in the order of a key. A range of keys can be read from many such files without reading the rest.

With random keys this shuffles: the rows of a range, from all files and in the order of their keys, are a random part of
all rows in random order. With hashes it brings equal ones together.
"""

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
READ_TOGETHER = 256  # most files that are read together
MERGED_BYTES = 32 << 20  # a merge holds so many of rows in memory


@persistently
def write_run(path: str, keys: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    """Writes rows, which are the concatenation of `parts`, in the ascending order of their `keys` `[rows]`, uint64."""
    order = np.argsort(keys, kind="stable")
    ends = np.cumsum([len(part) for part in parts])
    with replacing(path) as partial, partial.open("wb") as file:
        file.write(keys[order].data)
        for first in range(0, len(order), ROWS):
            rows = order[first : first + ROWS]
            sorted_rows = np.empty(len(rows), parts[0].dtype)
            owners = np.searchsorted(ends, rows, "right")
            for owner in np.unique(owners):
                own = owners == owner
                sorted_rows[own] = parts[owner][rows[own] - (ends[owner] - len(parts[owner]))]
            file.write(sorted_rows.data)


class Mapped(NamedTuple):
    """A file of rows, mapped into memory: ascending keys `[rows]`, and the rows."""

    keys: np.ndarray
    rows: np.ndarray

    def range(self, index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys and rows of the range `index` of `count` equal ranges of all possible keys."""
        place = slice(_place(self.keys, index, count), _place(self.keys, index + 1, count))
        return np.array(self.keys[place]), np.array(self.rows[place])


def open_run(path: str, row: np.dtype) -> Mapped:
    total = os.path.getsize(path) // (KEY.itemsize + row.itemsize)
    if not total:  # an empty file cannot be mapped
        return Mapped(np.empty(0, KEY), np.empty(0, row))
    content = np.memmap(path, np.uint8, "r")
    return Mapped(content[: total * KEY.itemsize].view(KEY), content[total * KEY.itemsize :].view(row))


def _place(keys: np.ndarray, index: int, count: int) -> int:
    """Where range `index` begins in ascending keys."""
    return len(keys) if index == count else int(np.searchsorted(keys, np.uint64((index << 64) // count)))


def divide(keys: np.ndarray, count: int) -> Iterator[tuple[int, slice]]:
    """Yields the ranges that have some of the ascending `keys`, each with their place."""
    bounds = np.array([(index << 64) // count for index in range(1, count)], np.uint64)
    found, first = np.unique(np.searchsorted(bounds, keys, "right"), return_index=True)
    for index, start, end in zip(found.tolist(), first.tolist(), [*first[1:].tolist(), len(keys)]):
        yield index, slice(start, end)


def gather(paths: Iterable[str], row: np.dtype, index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and rows of a range from all files, in the order of the keys."""
    return merge((open_run(path, row).range(index, count) for path in paths), row)


def merge_until_few(paths: Sequence[str], row: np.dtype, pool, ahead: int) -> list[str]:
    """Merges neighbours among the files of a folder, and deletes them, until `READ_TOGETHER` are left: their paths.

    So a range is gathered from a bounded number of files, however many there were. What is merged has a name that
    follows from the names of its parts: a process that was killed, and finds the same names, goes on where it was.
    """
    levels = [[(path, ()) for path in paths]]
    while len(levels[-1]) > READ_TOGETHER:
        below = [path for path, _ in levels[-1]]
        parts = [tuple(below[first : first + READ_TOGETHER]) for first in range(0, len(below), READ_TOGETHER)]
        levels.append([(_merged_path(part), part) for part in parts])
    done: set[str] = set()  # parts of what has been merged may be gone
    for level in reversed(levels):
        for path, parts in level:
            if path in done or (parts and os.path.exists(path)):
                done.update((path, *parts))
    for level in levels[1:]:
        wanted = [(path, parts) for path, parts in level if path not in done]
        for _ in in_order(pool, functools.partial(_merge_files, row=row), wanted, ahead):
            pass
    return [path for path, _ in levels[-1]]


def _merged_path(parts: Sequence[str]) -> str:
    names = "\n".join(map(os.path.basename, parts))
    return os.path.join(os.path.dirname(parts[0]), f"merged-{hashlib.sha256(names.encode()).hexdigest()[:32]}")


@persistently
def _merge_files(merged: tuple[str, Sequence[str]], row: np.dtype) -> None:
    path, parts = merged
    runs = [open_run(part, row) for part in parts]
    total = sum(len(run.keys) for run in runs)
    count = 1 + total * row.itemsize // MERGED_BYTES
    with replacing(path) as partial, partial.open("wb") as file:
        done = 0
        for index in range(count):
            keys, rows = merge((run.range(index, count) for run in runs), row)
            for first, array in ((KEY.itemsize * done, keys), (KEY.itemsize * total + row.itemsize * done, rows)):
                file.seek(first)
                file.write(array.data)
            done += len(keys)
    for part in parts:
        os.unlink(part)


def merge(parts: Iterable[tuple[np.ndarray, np.ndarray]], row: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and rows of all parts, in the order of the keys; of equal keys the first part first."""
    keys, rows = zip((np.empty(0, KEY), np.empty(0, row)), *parts)
    keys = np.concatenate(keys)
    order = np.argsort(keys, kind="stable")
    return keys[order], np.concatenate(rows)[order]
