"""Rows on disk in the order of a key. A range of keys can be read from many such files without reading the rest.

With random keys this shuffles: the rows of a range, from all files and in the order of their keys, are a random part of
all rows in random order. With hashes it brings equal ones together.
"""

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bertjax.files import persistently, replacing

KEY = np.dtype(np.uint64)
ROWS = 4096  # that are copied at a time


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


def read_range(path: str, row: np.dtype, index: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and rows of the range `index` of `count` equal ranges of all possible keys."""
    total = os.path.getsize(path) // (KEY.itemsize + row.itemsize)
    if not total:
        return np.empty(0, KEY), np.empty(0, row)
    keys = np.memmap(path, KEY, "r", shape=total)
    first, last = _place(keys, index, count), _place(keys, index + 1, count)
    offset = KEY.itemsize * total + row.itemsize * first
    return np.array(keys[first:last]), np.fromfile(path, row, last - first, offset=offset)


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
    return merge((read_range(path, row, index, count) for path in paths), row)


def merge(parts: Iterable[tuple[np.ndarray, np.ndarray]], row: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and rows of all parts, in the order of the keys; of equal keys the first part first."""
    keys, rows = zip((np.empty(0, KEY), np.empty(0, row)), *parts)
    keys = np.concatenate(keys)
    order = np.argsort(keys, kind="stable")
    return keys[order], np.concatenate(rows)[order]
