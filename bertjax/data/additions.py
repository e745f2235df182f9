"""What objectives add to the batches of a host, row by row."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bertjax.sharding.mesh import Batch


class Addition(NamedTuple):
    """Adds arrays to a batch, or changes them. A row depends on itself and its random numbers only.

    Attributes:
      add: (batch of padded rows, drawn numbers of these rows) -> {name: array whose first axis is rows}.
      draw: (generator, rows, length) -> arrays whose first axis is rows, in a tuple or a dict; None: it draws none.
    """

    add: Callable[[Batch, Any], Batch]
    draw: Callable[[np.random.Generator, int, int], Any] | None = None


def added(batch: Batch, additions: Sequence[Addition], places: np.ndarray, block: int, seed: list[int]) -> Batch:
    """Returns a batch with all additions, one after the other.

    Args:
      places: ascending places of the rows `[rows]`; random numbers are a function of `seed` and the place.
      block: the numbers of `block` places are drawn together.
    """
    for number, addition in enumerate(additions):
        drawn = None
        if addition.draw is not None:
            own = [*seed, number] if number else seed
            drawn = _drawn(addition.draw, places, block, own, batch["input_ids"].shape[1])
        batch = {**batch, **addition.add(batch, drawn)}
    return batch


def _drawn(draw: Callable, places: np.ndarray, block: int, seed: list[int], length: int):
    first, last = places[0] // block, places[-1] // block
    each = [draw(np.random.default_rng([*seed, number]), block, length) for number in range(first, last + 1)]
    drawn = each[0] if len(each) == 1 else jax.tree.map(lambda *parts: np.concatenate(parts), *each)
    if len(places) == len(jax.tree.leaves(drawn)[0]):
        return drawn
    return jax.tree.map(lambda values: values[places - first * block], drawn)
