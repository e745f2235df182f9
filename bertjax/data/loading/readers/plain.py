"""The reader without TensorFlow; `interface.Reader` describes the functions.

A thread reads and parses ahead, many records at a time for any batch size. A second thread would not help, because both
threads would wait for Python's global lock.
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
from bertjax.data.loading.readers.interface import PREFETCH, READ_BUFFER, Lost, Part, UnreadableRecord, ranges, readable
from bertjax.data.records import layouts
from bertjax.data.records.layouts import Format
from bertjax.data.records.parsing import InvalidRecord
from bertjax.data.records.serialization import Damaged, RecordOffsets, read_chunks

PARSED_TOGETHER, TOKENS_TOGETHER = 2048, 1 << 19  # approximate limits of records and tokens parsed together
STEPS_TOGETHER = 8  # maximum number of steps parsed together

Source = Iterator[list[bytes]]


def grouped(order: Order, form: Format, rows: np.ndarray, groups: np.ndarray, step: int, lost: Lost) -> Source:
    """Yields the sequences `rows` of each batch."""
    size = order.group_size
    places = (np.searchsorted(groups, rows // size) * size + rows % size).tolist()
    offsets = RecordOffsets()
    sources = [_group(order, form, int(group), step, lost, offsets) for group in groups]
    while True:
        records = list(itertools.chain.from_iterable(map(next, sources)))
        yield records if len(places) == len(records) else [records[place] for place in places]


def _group(order: Order, form: Format, group: int, step: int, lost: Lost, offsets: RecordOffsets) -> Source:
    """Yields the sequences of a group in each step: reads a window of each lane and arranges it."""

    def parts(lane: int) -> Iterator[Part]:
        for span in order.spans(lane, step):
            yield from readable(span, lost)

    lanes = [_read(parts(lane), form, offsets) for lane in order.lanes_of(group)]
    window, offset = divmod(step, order.steps)
    while True:
        records = [record for lane in lanes for record in itertools.islice(lane, order.window)]
        for places in order.arrangement(group, window).order[offset:].tolist():
            yield [records[place] for place in places]
        window, offset = window + 1, 0


def in_order(parts: Sequence[Part], form: Format, most: int, step: int, batch_size: int) -> Source:
    """Yields batches of the first `most` records of `parts`."""
    records = itertools.islice(_read(parts, form), step * batch_size, most)
    while batch := list(itertools.islice(records, batch_size)):
        yield batch


def side_by_side(parts: Sequence[Part], form: Format, total: int, rows: int, step: int) -> Source:
    """Yields batches with one record of the range of each row."""
    sources = [_read(ranges(parts, total, rows, row), form) for row in range(rows)]
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
    """Yields the parsed batches of a source. Raises `UnreadableRecord` after the batches before a damaged record."""
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
            if isinstance(item, (Damaged, OSError, InvalidRecord)):
                raise UnreadableRecord(str(item))
            if isinstance(item, BaseException):
                raise item
            yield from item
    finally:
        stopped.set()
        thread.join()


def _parse_next(source: Source, form: Format, put: Callable[[list[Batch]], None]) -> BaseException | None:
    """Puts the next parsed batches. Returns an error, `StopIteration` at the end of the source, or None."""
    try:
        steps, error = _take(source, max(1, min(PARSED_TOGETHER, TOKENS_TOGETHER // form.length)))
        if not steps:
            return error
        try:
            put(_parse(steps, form))
        except InvalidRecord:
            for step in steps:  # puts the steps before the damaged record
                put(_parse([step], form))
        time.sleep(0)  # lets the consumer of the batches run at once
        return error
    except BaseException as error:  # the consumer raises it
        return error


def _take(source: Source, most: int) -> tuple[list[list[bytes]], Exception | None]:
    """Takes steps with about `most` records together, and returns them with the error that ended the source, if any.

    The error at the end of an intact source is `StopIteration`.
    """
    steps: list[list[bytes]] = []
    count = 0
    while count < most and len(steps) < STEPS_TOGETHER:
        try:
            steps.append(next(source))
        except (Damaged, OSError, StopIteration) as error:
            return steps, error
        count += len(steps[-1])
    return steps, None


def _parse(steps: list[list[bytes]], form: Format) -> list[Batch]:
    """Parses the records of several steps together; returns their batches."""
    parsed = layouts.parse(list(itertools.chain.from_iterable(steps)), form)
    ends = [0, *itertools.accumulate(map(len, steps))]
    return [{name: values[a:b] for name, values in parsed.items()} for a, b in itertools.pairwise(ends)]
