"""Several sets of examples in one training: each batch is of one of them."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.examples import Examples, PackedOrder, TrainingOrder, steps_per_epoch
from bertjax.distributed.mesh import Rows


class Share(NamedTuple):
    """Examples, and how often they are used in an epoch: 2.0 is twice, 0.5 half of them."""

    examples: Examples
    weight: float


def steps_of_each(sizes: Sequence[int], weights: Sequence[float], batch_size: int) -> list[int]:
    """Returns the batches that each set has in an epoch, at least one."""
    return [max(1, round(weight * steps_per_epoch(size, batch_size))) for size, weight in zip(sizes, weights)]


class MixedOrder:
    """Assigns the steps of training to sets, and within each as its own order does.

    The steps of an epoch are of the sets in random order: a function of (seed, epoch).

    Args:
      counts: the steps of an epoch that each set has.
    """

    def __init__(self, orders: Sequence[PackedOrder | TrainingOrder], counts: Sequence[int], seed: int):
        self._orders, self._counts, self._seed = orders, counts, seed
        self.steps_per_epoch = sum(counts)
        self._epoch = functools.lru_cache(2)(self._epoch)

    def place(self, step: int) -> tuple[int, int]:
        """Returns the set of a step, counted from 0, and the number of this step among those of its set."""
        epoch, place = divmod(step, self.steps_per_epoch)
        sets, numbers = self._epoch(epoch)
        found = int(sets[place])
        return found, epoch * self._counts[found] + int(numbers[place])

    def shape(self, step: int) -> tuple[int, int]:
        """Returns how many rows are computed in a step, and their length."""
        found, own = self.place(step)
        return self._orders[found].shape(own)

    def batches(self, steps: range, rows: Rows) -> Iterator[Batch]:
        """Yields the batches of `steps`, of which each host computes its `rows`."""
        for step in steps:
            found, own = self.place(step)
            yield from self._orders[found].batches(range(own, own + 1), rows)

    def _epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """`[steps]`: the set of each step of an epoch, and how many earlier ones of the epoch are of the same set."""
        sets = np.repeat(np.arange(len(self._counts)), self._counts)
        sets = np.random.default_rng([self._seed, 2, number]).permutation(sets)
        numbers = np.empty_like(sets)
        for each, count in enumerate(self._counts):
            numbers[sets == each] = np.arange(count)
        return sets, numbers
