"""The interface of the readers of records: `tf_data`, and `plain` without TensorFlow. Both make equal batches.

A reader is a module with the functions of `Reader`. All functions except `batches` return a source: the serialized
records of each step.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.order import Order, Span
from bertjax.data.records.layouts import Format

READ_BUFFER = 1 << 20  # bytes
PREFETCH = 4  # batches

Lost = Mapping[str, tuple[range, ...]]  # path -> numbers of the records that empty records replace
Part = tuple[str, int, int, int]  # path, first record, number of records, number of empty records after them


class UnreadableRecord(Exception):
    """A record cannot be read; the message is the reason."""


class Reader(Protocol):
    """The functions of a reader."""

    def grouped(self, order: Order, form: Format, rows: np.ndarray, groups: np.ndarray, step: int, lost: Lost) -> Any:
        """Returns the sequences `rows` of each batch from `step`; `groups` of the order contain these sequences."""

    def in_order(self, parts: Sequence[Part], form: Format, most: int, step: int, batch_size: int) -> Any:
        """Returns batches of the first `most` records of `parts`, from `step` to the end."""

    def side_by_side(self, parts: Sequence[Part], form: Format, total: int, rows: int, step: int) -> Any:
        """Returns batches with one record per row, from `step` to the end.

        Each of the `rows` reads a range of the first `total` records of `parts`. All ranges have the same number of
        steps; shorter ranges end with an empty record.
        """

    def batches(self, source: Any, form: Format) -> Iterator[Batch]:
        """Yields the parsed batches of a source, see `pipeline.train_batches`. Raises `UnreadableRecord`."""


def reader() -> Reader:
    """Returns the reader: `tf_data` if TensorFlow is installed, else `plain`."""
    name = "tf_data" if importlib.util.find_spec("tensorflow") else "plain"
    return importlib.import_module(f"{__package__}.{name}")


def readable(span: Span, lost: Lost) -> Iterator[Part]:
    """Divides a span of records into parts without lost records."""
    path, first, count = span
    end = first + count
    for gap in lost.get(path, ()):
        gap = range(max(first, gap.start), min(end, gap.stop))
        if gap:
            yield path, first, gap.start - first, len(gap)
            first = gap.stop
    if first < end:
        yield path, first, end - first, 0


def ranges(parts: Sequence[Part], total: int, rows: int, row: int) -> Iterator[Part]:
    """Yields the parts of one row for `Reader.side_by_side`."""
    first, last = row * total // rows, (row + 1) * total // rows
    missing, start = -(-total // rows) - (last - first), 0
    for path, begin, count, empty in parts:
        here = range(max(first, start), min(last, start + count))
        if here:
            yield path, begin + here.start - start, len(here), 0
        start += count
        if lost := range(max(first, start), min(last, start + empty)):
            yield path, 0, 0, len(lost)
        start += empty
    yield parts[0][0], 0, 0, missing
