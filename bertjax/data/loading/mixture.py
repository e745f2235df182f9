"""Training on a mixture of datasets. All examples of a batch are from the same dataset."""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.examples import Examples, Order, steps_per_epoch
from bertjax.distributed.mesh import Rows


class WeightedExamples(NamedTuple):
    """A dataset and its weight: the mean number of uses of an example per epoch, such as 0.5."""

    examples: Examples
    weight: float


def steps_per_dataset(sizes: Sequence[int], weights: Sequence[float], batch_size: int) -> list[int]:
    """Returns the number of steps per epoch of each dataset, at least 1.

    Args:
      sizes: the number of examples of each dataset.
      weights: see `WeightedExamples`.
      batch_size: the number of examples in a batch.
    """
    return [max(1, round(weight * steps_per_epoch(size, batch_size))) for size, weight in zip(sizes, weights)]


def tempered_steps(sizes: Sequence[int], temperature: float, batch_size: int) -> list[int]:
    """Returns the number of steps per epoch of each dataset, in proportion to size ** (1 / temperature), at least 1.

    An epoch has as many steps as with weights of 1. A dataset with a share below one step gets one step. The other
    datasets divide the remaining steps.

    Args:
      sizes: the number of examples of each dataset.
      temperature: 1 for shares in proportion to the sizes; a high temperature for equal shares.
      batch_size: the number of examples in a batch.
    """
    total = sum(steps_per_epoch(size, batch_size) for size in sizes)
    logits = np.log(sizes) / temperature
    shares = np.exp(logits - logits.max())
    exact = total * shares / shares.sum()
    while (exact < 1).any():
        is_small = exact <= 1
        divisor = shares[~is_small].sum() if not is_small.all() else 1.0
        exact = np.where(is_small, 1, shares * (total - is_small.sum()) / divisor)
    steps = np.floor(exact).astype(int)
    # The steps that rounding down leaves over belong to the datasets with the largest remainders.
    steps[np.argsort(steps - exact, kind="stable")[: total - steps.sum()]] += 1
    return steps.tolist()


class MixedOrder(Order):
    """Assigns training steps to datasets in random order. The order of a dataset determines the examples of its steps.

    The assignment in an epoch is a function of (seed, epoch).
    """

    def __init__(self, orders: Sequence[Order], counts: Sequence[int], seed: int):
        """Creates the order.

        Args:
          orders: the order of each dataset.
          counts: the number of steps per epoch of each dataset, see `steps_per_dataset` and `tempered_steps`.
          seed: the seed of the order.
        """
        self._orders, self._counts, self._seed = orders, counts, seed
        self.steps_per_epoch = sum(counts)
        self._epoch = functools.lru_cache(2)(self._make_epoch)

    def locate(self, step: int) -> tuple[int, int]:
        """Returns the index of the dataset of a step, and the number of earlier steps of this dataset."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        sets, numbers = self._epoch(epoch)
        chosen = int(sets[step_in_epoch])
        return chosen, epoch * self._counts[chosen] + int(numbers[step_in_epoch])

    def shape(self, step: int) -> tuple[int, int]:
        """Returns the shape `(rows, length)` of the batch of a step."""
        chosen, step_of_set = self.locate(step)
        return self._orders[chosen].shape(step_of_set)

    def batches(self, steps: range, rows: Rows) -> Iterator[Batch]:
        """Yields the rows of this host in the batches of `steps`, see `distributed.mesh.Rows`."""
        for step in steps:
            chosen, step_of_set = self.locate(step)
            yield from self._orders[chosen].batches(range(step_of_set, step_of_set + 1), rows)

    def _make_epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns for the steps of an epoch `[steps]`: the dataset, and the number of earlier steps of this dataset."""
        sets = np.repeat(np.arange(len(self._counts)), self._counts)
        sets = np.random.default_rng([self._seed, 2, number]).permutation(sets)
        numbers = np.empty_like(sets)
        for chosen, count in enumerate(self._counts):
            numbers[sets == chosen] = np.arange(count)
        return sets, numbers
