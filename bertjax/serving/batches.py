"""Collects the inputs of requests into batches. Inputs of a similar length are computed together."""

import collections
import threading
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

SHORTEST = 127  # characters; all shorter texts have a similar length


class Full(Exception):
    """Too many inputs wait."""


class Ended(Exception):
    """The thread that computes has ended because of a fault."""


class _Work(NamedTuple):
    """Inputs that are computed together. `places`: their positions in the request. `done`: their results."""

    key: tuple[Hashable, int]
    places: list[int]
    inputs: list[Any]
    rows: int
    done: Future[list[Any]]


class Batches:
    """Computes inputs in one thread.

    Args:
      compute: (key, inputs) -> a result for each input. Raises an error if an input is wrong; then the inputs of each
        request are computed separately.
      most: the maximum number of rows of the inputs that are computed together. An input with more rows is computed
        alone.
      waiting: the maximum number of rows of the inputs that wait.
      seen: called with the number of inputs that are computed together.
    """

    def __init__(
        self,
        compute: Callable[[Any, list[Any]], Sequence[Any]],
        most: int = 32,
        waiting: int = 4096,
        seen: Callable[[int], object] = lambda count: None,
    ):
        self._compute, self._most, self._waiting, self._seen = compute, most, waiting, seen
        self._works: dict[Future[list[Any]], _Work] = {}  # in the order of their arrival
        self.count = 0  # rows of the inputs that wait
        self._changed = threading.Condition()
        self._stopped = False
        self._failed = False
        self._running: list[_Work] = []
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def submit(
        self, key: Hashable, inputs: Sequence[Any], sizes: Sequence[int], rows: Sequence[int] | None = None
    ) -> list[tuple[list[int], Future[list[Any]]]]:
        """Adds inputs. Returns pairs of positions of inputs and the future of their results.

        If a future is canceled, its inputs wait no longer.

        Args:
          key: inputs with equal keys may be computed together.
          inputs: the inputs.
          sizes: the lengths of the inputs in characters.
          rows: the number of sequences that the model computes for each input; None for one sequence per input.

        Raises:
          Full: too many inputs wait.
          Ended: the thread that computes has ended because of a fault.
        """
        rows = rows or [1] * len(inputs)
        groups: dict[int, list[int]] = collections.defaultdict(list)
        for place in sorted(range(len(inputs)), key=sizes.__getitem__):
            groups[max(SHORTEST, sizes[place]).bit_length()].append(place)
        works = []
        for length, group in groups.items():
            for places in _divide(group, rows, self._most):
                total = sum(rows[place] for place in places)
                works.append(_Work((key, length), places, [inputs[place] for place in places], total, Future()))
        with self._changed:
            if self._failed:
                raise Ended
            if self._stopped or self.count + sum(rows) > self._waiting:
                raise Full
            self._works |= {work.done: work for work in works}
            self.count += sum(rows)
            self._changed.notify()
        for work in works:
            work.done.add_done_callback(self._remove_canceled)
        return [(work.places, work.done) for work in works]

    def _remove_canceled(self, done: Future[list[Any]]) -> None:
        """Removes the inputs of a future that was canceled before their computation began."""
        if done.cancelled():
            with self._changed:
                if work := self._works.pop(done, None):
                    self.count -= work.rows

    def close(self) -> None:
        """Refuses new inputs, computes the waiting inputs, and returns when they are done."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    @property
    def is_working(self) -> bool:
        """Whether the thread that computes has not ended because of a fault."""
        return not self._failed

    def _run(self) -> None:
        try:
            while works := self._next():
                self._running = [work for work in works if work.done.set_running_or_notify_cancel()]
                if self._running:
                    self._answer(self._running)
        except BaseException:
            traceback.print_exc()
            self._fail()

    def _fail(self) -> None:
        """Refuses new inputs, and answers all works with an error, because no thread will compute them."""
        with self._changed:
            self._failed = True
            waiting, self._works, self.count = self._works, {}, 0
        works = [*self._running, *(work for work in waiting.values() if work.done.set_running_or_notify_cancel())]
        for work in works:
            if not work.done.done():
                work.done.set_exception(Ended())

    def _answer(self, works: list[_Work]) -> None:
        """Computes the results of works together, or separately if that raises an error.

        A `PanicException` of the tokenizers library is not an `Exception`; it must not end the thread.
        """
        try:
            results = self._results(works[0].key[0], [value for work in works for value in work.inputs])
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            if len(works) == 1:
                works[0].done.set_exception(_as_exception(error))
            else:
                for work in works:
                    self._answer([work])
            return
        for work in works:
            work.done.set_result(results[: len(work.inputs)])
            results = results[len(work.inputs) :]

    def _results(self, key: Hashable, inputs: list[Any]) -> list[Any]:
        """Returns the result of each input. `compute` pads batches to few shapes, because each shape is compiled."""
        self._seen(len(inputs))
        return list(self._compute(key, inputs))

    def _next(self) -> list[_Work]:
        """Waits for works; takes the oldest work and works with the same key. Returns [] once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._works or self._stopped)
            taken: list[_Work] = []
            count = 0
            for work in self._works.values():
                if not taken or (work.key == taken[0].key and count + work.rows <= self._most):
                    taken.append(work)
                    count += work.rows
            for work in taken:
                del self._works[work.done]
            self.count -= count
            return taken


def _divide(places: Sequence[int], rows: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yields portions of places with at most `most` rows in total, or one place with more rows."""
    portion: list[int] = []
    total = 0
    for place in places:
        if portion and total + rows[place] > most:
            yield portion
            portion, total = [], 0
        portion.append(place)
        total += rows[place]
    if portion:
        yield portion


def _as_exception(error: BaseException) -> Exception:
    """Returns an error as an `Exception`, so that it does not end the event loop of the thread that receives it."""
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
