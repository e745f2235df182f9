"""Training on several sets of examples. All examples of a batch are from the same set."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.examples import Examples, PackedOrder, TrainingOrder, steps_per_epoch
from bertjax.distributed.mesh import Rows


class Share(NamedTuple):
    """A set of examples and its weight: the number of times that an epoch uses each example. It may be a fraction."""

    examples: Examples
    weight: float


def steps_of_each(sizes: Sequence[int], weights: Sequence[float], batch_size: int) -> list[int]:
    """Returns the number of batches of each set in an epoch, at least one."""
    return [max(1, round(weight * steps_per_epoch(size, batch_size))) for size, weight in zip(sizes, weights)]


class MixedOrder:
    """Assigns the steps of training to sets. The order of a set determines the examples of its steps.

    The sets of the steps of an epoch are in random order, a function of (seed, epoch).
    """

    def __init__(self, orders: Sequence[PackedOrder | TrainingOrder], counts: Sequence[int], seed: int):
        """Creates the order.

        Args:
          orders: the order of each set.
          counts: the number of steps of each set in an epoch.
          seed: the seed of the order.
        """
        self._orders, self._counts, self._seed = orders, counts, seed
        self.steps_per_epoch = sum(counts)
        self._epoch = functools.lru_cache(2)(self._make_epoch)

    def place(self, step: int) -> tuple[int, int]:
        """Returns the number of the set of a step, and the number of the step among the steps of this set."""
        epoch, place = divmod(step, self.steps_per_epoch)
        sets, numbers = self._epoch(epoch)
        chosen = int(sets[place])
        return chosen, epoch * self._counts[chosen] + int(numbers[place])

    def shape(self, step: int) -> tuple[int, int]:
        """Returns the number of rows of a step and their length."""
        chosen, step_of_set = self.place(step)
        return self._orders[chosen].shape(step_of_set)

    def batches(self, steps: range, rows: Rows) -> Iterator[Batch]:
        """Yields the `rows` of this host of the batches of `steps`."""
        for step in steps:
            chosen, step_of_set = self.place(step)
            yield from self._orders[chosen].batches(range(step_of_set, step_of_set + 1), rows)

    def _make_epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each step of an epoch, `[steps]`: its set, and the number of earlier steps of the same set."""
        sets = np.repeat(np.arange(len(self._counts)), self._counts)
        sets = np.random.default_rng([self._seed, 2, number]).permutation(sets)
        numbers = np.empty_like(sets)
        for chosen, count in enumerate(self._counts):
            numbers[sets == chosen] = np.arange(count)
        return sets, numbers
