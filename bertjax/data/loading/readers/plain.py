"""The reader without TensorFlow; `interface.Reader` describes the functions.

A thread reads and parses records in advance. It parses the records of several steps together, which is faster for small
batches. A second thread would not be faster, because of Python's global lock.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.order import Order
from bertjax.data.loading.readers.interface import (
    PREFETCH,
    READ_BUFFER,
    Part,
    SkippedRecords,
    UnreadableRecord,
    parts_of_row,
    split_span,
)
from bertjax.data.records import layouts
from bertjax.data.records.layouts import Format
from bertjax.data.records.parsing import InvalidRecord
from bertjax.data.records.serialization import DamagedRecord, RecordOffsets, read_chunks

PARSED_TOGETHER = 2048  # the approximate maximum number of records that are parsed together
TOKENS_TOGETHER = 1 << 19  # the approximate maximum number of tokens that are parsed together
STEPS_TOGETHER = 8  # the maximum number of steps whose records are parsed together

Source = Iterator[list[bytes]]


def training_source(
    order: Order, form: Format, rows: np.ndarray, groups: np.ndarray, step: int, skipped: SkippedRecords
) -> Source:
    """Yields the records of each step, see `Reader.training_source`."""
    size = order.group_size
    places = (np.searchsorted(groups, rows // size) * size + rows % size).tolist()
    offsets = RecordOffsets()
    sources = [_group(order, form, int(group), step, skipped, offsets) for group in groups]
    while True:
        records = list(itertools.chain.from_iterable(map(next, sources)))
        yield records if len(places) == len(records) else [records[place] for place in places]


def _group(
    order: Order, form: Format, group: int, step: int, skipped: SkippedRecords, offsets: RecordOffsets
) -> Source:
    """Yields the records of a group in each step: reads a window of each lane, and arranges the records."""

    def parts(lane: int) -> Iterator[Part]:
        for span in order.spans(lane, step):
            yield from split_span(span, skipped)

    lanes = [_read(parts(lane), form, offsets) for lane in order.lanes_of(group)]
    window, offset = divmod(step, order.steps)
    while True:
        records = [record for lane in lanes for record in itertools.islice(lane, order.window)]
        for places in order.arrangement(group, window).order[offset:].tolist():
            yield [records[place] for place in places]
        window, offset = window + 1, 0


def heldout_source(parts: Sequence[Part], form: Format, most: int, step: int, batch_size: int) -> Source:
    """Yields the records of each step, see `Reader.heldout_source`."""
    records = itertools.islice(_read(parts, form), step * batch_size, most)
    while batch := list(itertools.islice(records, batch_size)):
        yield batch


def heldout_stream_source(parts: Sequence[Part], form: Format, total: int, rows: int, step: int) -> Source:
    """Yields the records of each step, see `Reader.heldout_stream_source`."""
    sources = [_read(parts_of_row(parts, total, rows, row), form) for row in range(rows)]
    yield from itertools.islice(map(list, zip(*sources)), step, None)


def _read(parts: Iterable[Part], form: Format, offsets: RecordOffsets | None = None) -> Iterator[bytes]:
    return itertools.chain.from_iterable(_read_chunks(parts, form, offsets or RecordOffsets()))


def _read_chunks(parts: Iterable[Part], form: Format, offsets: RecordOffsets) -> Iterator[Iterable[bytes]]:
    empty = layouts.empty_record(form)
    for path, first, count, missing in parts:
        if count:
            yield from read_chunks(path, first, count, READ_BUFFER, offsets)
        yield itertools.repeat(empty, missing)


def batches(source: Source, form: Format) -> Iterator[Batch]:
    """Yields the parsed batches of a source. Raises `UnreadableRecord` at the first batch with a damaged record."""
    ahead: queue.Queue = queue.Queue(PREFETCH)
    stopped = threading.Event()

    def put(item: Any) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                return ahead.put(item, timeout=0.1)

    def read() -> None:
        error = None
        while not stopped.is_set() and error is None:
            error = _parse_next(source, form, put)
        put(error)

    thread = threading.Thread(target=read, name="read records", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ahead.get(), StopIteration):
            if isinstance(item, (DamagedRecord, OSError, InvalidRecord)):
                raise UnreadableRecord(str(item))
            if isinstance(item, BaseException):
                raise item
            yield from item
    finally:
        stopped.set()
        thread.join()


def _parse_next(source: Source, form: Format, put: Callable[[list[Batch]], None]) -> BaseException | None:
    """Parses the next batches and passes them to `put`. Returns `StopIteration` at the end, another error, or None."""
    try:
        steps, error = _take_steps(source, max(1, min(PARSED_TOGETHER, TOKENS_TOGETHER // form.length)))
        if not steps:
            return error
        try:
            put(_parse(steps, form))
        except InvalidRecord:
            for step in steps:  # puts the batches before the damaged record, and raises `InvalidRecord` again
                put(_parse([step], form))
        time.sleep(0)  # releases Python's global lock, so that the consumer of the batches runs
        return error
    except BaseException as error:  # the consumer raises the error
        return error


def _take_steps(source: Source, most: int) -> tuple[list[list[bytes]], Exception | None]:
    """Takes the records of the next steps, about `most` records, from a source.

    Returns:
      The records of each step; and the error that ended the source, or None. The error of an intact source is
      `StopIteration`.
    """
    steps: list[list[bytes]] = []
    count = 0
    while count < most and len(steps) < STEPS_TOGETHER:
        try:
            steps.append(next(source))
        except (DamagedRecord, OSError, StopIteration) as error:
            return steps, error
        count += len(steps[-1])
    return steps, None


def _parse(steps: list[list[bytes]], form: Format) -> list[Batch]:
    """Parses the records of several steps together, and returns the batches of the steps."""
    parsed = layouts.parse_records(list(itertools.chain.from_iterable(steps)), form)
    ends = [0, *itertools.accumulate(map(len, steps))]
    return [{name: values[a:b] for name, values in parsed.items()} for a, b in itertools.pairwise(ends)]
