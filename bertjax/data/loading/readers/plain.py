"""The reader without TensorFlow; see the package for what its functions do.

A thread reads and parses ahead, many records at a time whatever the batch size. A second one would not help: they
would wait for each other in Python.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bertjax.data.loading.order import Order
from bertjax.data.loading.readers.interface import PREFETCH, READ_BUFFER, Part, UnreadableRecord, ranges, readable
from bertjax.data.records import layouts
from bertjax.data.records.layouts import Format
from bertjax.data.records.parsing import Unfit
from bertjax.data.records.serialization import Damaged, RecordOffsets, read_chunks
from bertjax.distributed.mesh import Batch

PARSED_TOGETHER, TOKENS_TOGETHER = 2048, 1 << 19  # records, and tokens of all: about, at most
STEPS_TOGETHER = 8  # at most

Source = Iterator[list[bytes]]


def grouped(order: Order, form: Format, rows: np.ndarray, groups: np.ndarray, step: int, lost) -> Source:
    size = order.group_size
    wanted = (np.searchsorted(groups, rows // size) * size + rows % size).tolist()
    known = RecordOffsets()
    each = [_group(order, form, int(group), step, lost, known) for group in groups]
    while True:
        records = list(itertools.chain.from_iterable(map(next, each)))
        yield records if len(wanted) == len(records) else [records[place] for place in wanted]


def _group(order: Order, form: Format, group: int, step: int, lost, known: RecordOffsets) -> Source:
    """The sequences of a group: those of a window of each of its lanes, as they are arranged."""

    def parts(lane):
        for span in order.spans(lane, step):
            yield from readable(span, lost)

    lanes = [_read(parts(lane), form, known) for lane in order.lanes_of(group)]
    window, offset = divmod(step, order.steps)
    while True:
        records = [record for lane in lanes for record in itertools.islice(lane, order.window)]
        for places in order.arrangement(group, window).order[offset:].tolist():
            yield [records[place] for place in places]
        window, offset = window + 1, 0


def in_order(parts: Sequence[Part], form: Format, most: int, step: int, batch_size: int) -> Source:
    records = itertools.islice(_read(parts, form), step * batch_size, most)
    while batch := list(itertools.islice(records, batch_size)):
        yield batch


def side_by_side(parts: Sequence[Part], form: Format, total: int, rows: int, step: int) -> Source:
    each = [_read(ranges(parts, total, rows, row), form) for row in range(rows)]
    yield from itertools.islice(map(list, zip(*each)), step, None)


def _read(parts: Iterable[Part], form: Format, known: RecordOffsets | None = None) -> Iterator[bytes]:
    return itertools.chain.from_iterable(_read_together(parts, form, known or RecordOffsets()))


def _read_together(parts: Iterable[Part], form: Format, known: RecordOffsets) -> Iterator[Iterable[bytes]]:
    empty = layouts.empty_record(form)
    for path, first, count, missing in parts:
        if count:
            yield from read_chunks(path, first, count, READ_BUFFER, known)
        yield itertools.repeat(empty, missing)


def batches(source: Source, form: Format) -> Iterator[Batch]:
    ahead: queue.Queue = queue.Queue(PREFETCH)
    stopped = threading.Event()

    def put(item) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                return ahead.put(item, timeout=0.1)

    def read() -> None:
        error = None
        while not stopped.is_set() and error is None:
            try:
                steps, error = _some(source, max(1, min(PARSED_TOGETHER, TOKENS_TOGETHER // form.length)))
                if steps:
                    put(_parse(steps, form))
                    time.sleep(0)  # whoever waits for it may go on at once
            except Unfit:  # one of them: those before it are handed on
                for step in steps:
                    try:
                        put(_parse([step], form))
                    except Unfit as unfit:
                        error = unfit
                        break
            except BaseException as other:  # raised where batches are taken
                error = other
        put(error)

    thread = threading.Thread(target=read, name="read records", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ahead.get(), StopIteration):
            if isinstance(item, (Damaged, OSError, Unfit)):
                raise UnreadableRecord(str(item))
            if isinstance(item, BaseException):
                raise item
            yield from item
    finally:
        stopped.set()
        thread.join()


def _some(source: Source, most: int) -> tuple[list[list[bytes]], Exception | None]:
    """Takes steps that are parsed together, with about `most` records. Returns them, and why there are no more: an
    error, or `StopIteration`."""
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
    parsed = layouts.parse(list(itertools.chain.from_iterable(steps)), form)
    ends = [0, *itertools.accumulate(map(len, steps))]
    return [{name: values[a:b] for name, values in parsed.items()} for a, b in itertools.pairwise(ends)]
