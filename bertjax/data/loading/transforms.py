"""What objectives add to the batches of a host, row by row."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

FOLLOWING = "following"  # the token after a row of a stream, `[rows]`, -1: none; additions see it, the model does not
Arrays = dict[str, np.ndarray]  # the first axis of each is rows


class Addition(NamedTuple):
    """Adds arrays to a batch, or changes `input_ids`. A row depends on its record and its random numbers only.

    Attributes:
      add: (batch of padded rows, random numbers of these rows) -> the arrays that it adds, or changes.
      draw: (generator, rows, length) -> random numbers; None: it takes none, and `add` gets an empty dict.
      seed: tells its random numbers from those of others.
    """

    add: Callable[[Arrays, Arrays], Arrays]
    draw: Callable[[np.random.Generator, int, int], Arrays] | None = None
    seed: tuple[int, ...] = ()


def added(batch: Arrays, additions: Sequence[Addition], places: np.ndarray, block: int, seed: list[int]) -> Arrays:
    """Returns a batch with all additions, none of which sees the others.

    Args:
      places: ascending places of the rows `[rows]`; random numbers are a function of `seed` and the place.
      block: the numbers of `block` places are drawn together.
    """
    found, length = dict(batch), batch["input_ids"].shape[1]
    for addition in additions:
        drawn = _drawn(addition.draw, places, block, [*seed, *addition.seed], length) if addition.draw else {}
        found |= addition.add(batch, drawn)
    return found


def _drawn(draw: Callable, places: np.ndarray, block: int, seed: list[int], length: int) -> Arrays:
    first, last = places[0] // block, places[-1] // block
    each = [draw(np.random.default_rng([*seed, number]), block, length) for number in range(first, last + 1)]
    drawn = each[0] if len(each) == 1 else {name: np.concatenate([part[name] for part in each]) for name in each[0]}
    if len(places) == block * len(each):
        return drawn
    return {name: values[places - first * block] for name, values in drawn.items()}
