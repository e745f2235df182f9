"""Readers of records: `tf_data`, and `plain`, which reads where TensorFlow is not installed. Both make equal batches.

A reader has these functions, of which all but `batches` return a source, the serialized records of each step:

  grouped(order, form, rows, groups, step, lost): the sequences `rows` of each batch from `step` on, which these
    `groups` of `order` have.
  in_order(parts, form, most, step, batch_size): the first `most` records of `parts`, once, from `step` on.
  side_by_side(parts, form, total, rows, step): the first `total` records of `parts` from `step` on: each of the `rows`
    reads a range of them. All ranges have as many steps; in the last one of some there is no record.
  batches(source, form): yields parsed batches, see `pipeline.train_batches`. Raises `UnreadableRecord`.

`lost` has the records of each path that are replaced by empty ones; for `parts` see `readable`.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping

from bertjax.data.loading.order import Span

READ_BUFFER = 1 << 20  # bytes
PREFETCH = 4  # batches

Part = tuple[str, int, int, int]  # path, first record, number of records, number of empty rows that follow


class UnreadableRecord(Exception):
    """A record cannot be read; says why."""


def reader():
    """Returns the module that reads."""
    name = "tf_data" if importlib.util.find_spec("tensorflow") else "plain"
    return importlib.import_module(f"{__package__}.{name}")


def readable(span: Span, lost: Mapping[str, tuple[range, ...]]) -> Iterator[Part]:
    """Divides a span into parts, so that none has records that are lost."""
    path, first, count = span
    end = first + count
    for gap in lost.get(path, ()):
        gap = range(max(first, gap.start), min(end, gap.stop))
        if gap:
            yield path, first, gap.start - first, len(gap)
            first = gap.stop
    if first < end:
        yield path, first, end - first, 0


def ranges(parts: list[Part], total: int, rows: int, row: int) -> Iterator[Part]:
    """Yields the parts that a row reads, of `rows` that read the first `total` records of `parts` side by side."""
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
