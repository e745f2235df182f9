"""The interface of the readers of records: `tf_data`, and `plain` without TensorFlow. Both return equal batches.

A reader is a module with the functions of `Reader`. The functions except `batches` return a source, which contains the
serialized records of consecutive steps.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.order import Order, Span
from bertjax.data.records.layouts import Format

READ_BUFFER = 1 << 20  # bytes
PREFETCH = 4  # batches

SkippedRecords = dict[str, tuple[range, ...]]  # {path: numbers of the records that empty records replace}
Part = tuple[str, int, int, int]  # path, first record, number of records, number of empty records that follow


class UnreadableRecord(Exception):
    """A record cannot be read; the message is the reason."""


class Reader(Protocol):
    """The functions of a reader."""

    def training_source(
        self, order: Order, form: Format, rows: np.ndarray, groups: np.ndarray, step: int, skipped: SkippedRecords
    ) -> Any:
        """Returns the source of training, from `step`.

        Args:
          order: the order of the records.
          form: the format of the records.
          rows: the indices of the sequences in a padded batch that are read, `[sequences]`.
          groups: the groups of `order` that contain these sequences, ascending.
          step: the first step.
          skipped: the records that empty records replace.
        """

    def heldout_source(self, parts: Sequence[Part], form: Format, most: int, step: int, batch_size: int) -> Any:
        """Returns the source of batches with the first `most` records of `parts` in order, from `step`."""

    def heldout_stream_source(self, parts: Sequence[Part], form: Format, total: int, rows: int, step: int) -> Any:
        """Returns the source of batches with one record per row, from `step`.

        The first `total` records of `parts` are divided into `rows` contiguous ranges. Row i reads range i in order. An
        empty record is appended to a range that is shorter than the longest range.
        """

    def batches(self, source: Any, form: Format) -> Iterator[Batch]:
        """Yields the parsed batches of a source, see `batch.RECORD_ARRAYS`. Raises `UnreadableRecord`."""


def reader() -> Reader:
    """Returns the reader: `tf_data` if TensorFlow is installed, else `plain`."""
    name = "tf_data" if importlib.util.find_spec("tensorflow") else "plain"
    return importlib.import_module(f"{__package__}.{name}")


def split_span(span: Span, skipped: SkippedRecords) -> Iterator[Part]:
    """Divides a span of records into parts, in which empty records replace the skipped records."""
    path, first, count = span
    end = first + count
    for gap in skipped.get(path, ()):
        gap = range(max(first, gap.start), min(end, gap.stop))
        if gap:
            yield path, first, gap.start - first, len(gap)
            first = gap.stop
    if first < end:
        yield path, first, end - first, 0


def parts_of_row(parts: Sequence[Part], total: int, rows: int, row: int) -> Iterator[Part]:
    """Yields the parts of row `row` of `rows`, see `Reader.heldout_stream_source`."""
    first, last = row * total // rows, (row + 1) * total // rows
    missing, start = -(-total // rows) - (last - first), 0
    for path, begin, count, empty in parts:
        here = range(max(first, start), min(last, start + count))
        if here:
            yield path, begin + here.start - start, len(here), 0
        start += count
        if skipped := range(max(first, start), min(last, start + empty)):
            yield path, 0, 0, len(skipped)
        start += empty
    yield parts[0][0], 0, 0, missing
