"""Requests become batches: what waits while the model computes is computed together, texts of a like length at once."""

import collections
import concurrent.futures
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

SHORTEST = 127  # characters; texts of up to so many are of a like length


class Full(Exception):
    """So many inputs wait that no more are taken."""


class _Work(NamedTuple):
    key: Hashable  # what can be computed together
    inputs: list
    done: concurrent.futures.Future


class Batches:
    """Computes inputs in a thread of its own.

    Args:
      compute: (what, inputs) -> a result for each input. Raises for all of them if one is wrong; it is then asked again
        for those of each caller alone.
      most: inputs that are computed together.
      waiting: inputs that may wait.
      seen: is told how many inputs are computed together.
    """

    def __init__(
        self,
        compute: Callable[[Hashable, list], Sequence],
        most: int = 32,
        waiting: int = 4096,
        seen: Callable[[int], object] = lambda count: None,
    ):
        self._compute, self._most, self._waiting, self._seen = compute, most, waiting, seen
        self._works: collections.deque[_Work] = collections.deque()
        self._count = 0  # inputs that wait
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """Inputs that wait."""
        return self._count

    def submit(self, what: Hashable, inputs: Sequence, sizes: Sequence[int]) -> list[tuple]:
        """Adds inputs, given with their lengths in characters. Returns pairs of the places of some inputs and a future
        of their results. Raises `Full`."""
        order = sorted(range(len(inputs)), key=sizes.__getitem__)
        groups: dict[int, list[int]] = collections.defaultdict(list)
        for place in order:
            groups[max(SHORTEST, sizes[place]).bit_length()].append(place)
        parts = [
            (like, found[start : start + self._most])
            for like, found in groups.items()
            for start in range(0, len(found), self._most)
        ]
        works = [_Work((what, like), [inputs[i] for i in found], concurrent.futures.Future()) for like, found in parts]
        with self._changed:
            if self._stopped or self._count + len(inputs) > self._waiting:
                raise Full
            self._works.extend(works)
            self._count += len(inputs)
            self._changed.notify()
        return [(found, work.done) for (_, found), work in zip(parts, works)]

    def close(self) -> None:
        """Takes no more, computes what waits, and returns when that is done."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while works := self._next():
            works = [work for work in works if work.done.set_running_or_notify_cancel()]
            if not works:
                continue
            try:
                results = self._results(works[0].key, [each for work in works for each in work.inputs])
            except Exception as error:
                if len(works) == 1:
                    works[0].done.set_exception(error)
                    continue
                for work in works:
                    self._alone(work)
                continue
            for work in works:
                work.done.set_result(results[: len(work.inputs)])
                results = results[len(work.inputs) :]

    def _alone(self, work: _Work) -> None:
        try:
            work.done.set_result(self._results(work.key, work.inputs))
        except Exception as error:
            work.done.set_exception(error)

    def _results(self, key, inputs: list) -> list:
        """Computes a power of two of inputs, so that few shapes are compiled."""
        self._seen(len(inputs))
        missing = (1 << (len(inputs) - 1).bit_length()) - len(inputs)
        return list(self._compute(key[0], inputs + inputs[-1:] * missing))[: len(inputs)]

    def _next(self) -> list[_Work]:
        """Waits for work; takes the oldest, and what can be computed with it. None once closed and empty."""
        with self._changed:
            while not self._works and not self._stopped:
                self._changed.wait()
            taken: list[_Work] = []
            count, left = 0, collections.deque()
            while self._works:
                work = self._works.popleft()
                if (not taken or work.key == taken[0].key) and count + len(work.inputs) <= self._most:
                    taken.append(work)
                    count += len(work.inputs)
                else:
                    left.append(work)
            self._works = left
            self._count -= count
            return taken
