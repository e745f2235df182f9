"""Transforms of the batches of a host, such as dynamic masking. Each takes random numbers per row."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import Batch, BatchSpec


class BatchTransform(abc.ABC):
    """Adds arrays to a batch, or changes `input_ids`.

    A row of the result depends only on the same row of the batch and on the random numbers of that row. Rows of the
    batch are padded, not packed.
    """

    @abc.abstractmethod
    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the arrays that the transform adds or changes, `[rows, ...]`.

        Args:
          batch: the arrays of the records, see `bertjax.data.batch.RECORD_ARRAYS`.
          draws: the random numbers of these rows, as `draw` returns them.
        """

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> Batch:
        """Returns random numbers for `rows` rows of `length` tokens, `[rows, ...]`; none by default."""
        del rng, rows, length
        return {}


class SeededTransform(NamedTuple):
    """A transform of an objective, with the seed of its random numbers.

    Attributes:
      transform: the transform.
      seed: numbers that separate the random numbers of one transform from the random numbers of another.
      adds: the arrays that the transform may add; None: any.
      owner: the name of the objective.
    """

    transform: BatchTransform
    seed: tuple[int, ...] = ()
    adds: BatchSpec | None = None
    owner: str = ""


def transformed(
    batch: Batch, transforms: Sequence[SeededTransform], places: np.ndarray, block: int, seed: list[int]
) -> Batch:
    """Returns a batch after all transforms. Each transform reads the batch before any transform.

    Args:
      batch: padded rows.
      transforms: the transforms.
      places: ascending places of the rows in the order of all sequences, `[rows]`. Random numbers are a function of
        `seed` and the place.
      block: the random numbers of `block` places are drawn together.
      seed: the seed of the run.

    Raises:
      ValueError: if a transform adds an array that it does not declare, or with another type.
    """
    result, length = dict(batch), batch["input_ids"].shape[1]
    for transform, transform_seed, adds, owner in transforms:
        draws = _draws(transform, places, block, [*seed, *transform_seed], length)
        arrays = transform(batch, draws)
        if adds is not None:
            _check(owner, arrays, adds)
        result |= arrays
    return result


def _check(owner: str, arrays: Batch, adds: BatchSpec) -> None:
    types = {name: np.dtype(array.dtype) for name, array in adds.items()} | {"input_ids": np.dtype(np.int32)}
    if wrong := {name: str(values.dtype) for name, values in arrays.items() if types.get(name) != values.dtype}:
        raise ValueError(f"objective {owner}: its transform adds {wrong} to batches; declare these in `batch_spec`")


def _draws(transform: BatchTransform, places: np.ndarray, block: int, seed: list[int], length: int) -> Batch:
    """Returns the random numbers of the rows at some places."""
    first, last = places[0] // block, places[-1] // block
    blocks = [
        transform.draw(np.random.default_rng([*seed, number]), block, length) for number in range(first, last + 1)
    ]
    draws = blocks[0] if len(blocks) == 1 else {name: np.concatenate([x[name] for x in blocks]) for name in blocks[0]}
    if len(places) == block * len(blocks):
        return draws
    return {name: values[places - first * block] for name, values in draws.items()}
