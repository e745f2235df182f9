"""Transforms of the batches of a host, such as dynamic masking."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import Batch, BatchSpec


class BatchTransform(abc.ABC):
    """Adds arrays to a batch, or changes `input_ids`.

    A row of the result depends only on the same row of the batch and of the random numbers. Rows of the batch are
    padded, not packed.
    """

    @abc.abstractmethod
    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the arrays that the transform adds or changes, `[rows, ...]`.

        Args:
          batch: the arrays of the records, see `bertjax.data.batch.RECORD_ARRAYS`.
          draws: the random numbers `[rows, ...]` of these rows, from `draw`.
        """

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> Batch:
        """Returns random numbers `[rows, ...]` for rows of `length` tokens. The default returns no random numbers."""
        del rng, rows, length
        return {}


class SeededTransform(NamedTuple):
    """A transform of an objective, with the seed of its random numbers.

    Attributes:
      transform: the transform.
      seed: numbers that are appended to the seed of the run. They differ between the transforms of a run.
      adds: the spec of the arrays that the transform may add; None for all arrays.
      owner: the name of the objective, for messages.
    """

    transform: BatchTransform
    seed: tuple[int, ...] = ()
    adds: BatchSpec | None = None
    owner: str = ""


def apply_transforms(
    batch: Batch, transforms: Sequence[SeededTransform], indices: np.ndarray, block: int, seed: list[int]
) -> Batch:
    """Applies all transforms to a batch. All transforms read the original batch.

    Args:
      batch: padded rows.
      transforms: the transforms.
      indices: ascending indices of the rows in the order of all sequences, `[rows]`. Random numbers are a function of
        `seed` and the index.
      block: random numbers are generated for blocks of `block` indices.
      seed: the seed of the run.

    Raises:
      ValueError: if a transform adds an array that `adds` does not declare, or declares with another dtype.
    """
    result, length = dict(batch), batch["input_ids"].shape[1]
    for transform, transform_seed, adds, owner in transforms:
        draws = _draw_rows(transform, indices, block, [*seed, *transform_seed], length)
        arrays = transform(batch, draws)
        if adds is not None:
            _check_added_arrays(owner, arrays, adds)
        result |= arrays
    return result


def _check_added_arrays(owner: str, arrays: Batch, adds: BatchSpec) -> None:
    types = {name: np.dtype(array.dtype) for name, array in adds.items()} | {"input_ids": np.dtype(np.int32)}
    if wrong := {name: str(values.dtype) for name, values in arrays.items() if types.get(name) != values.dtype}:
        raise ValueError(
            f"objective {owner}: its transform adds {wrong} to batches; declare these arrays in `batch_spec`"
        )


def _draw_rows(transform: BatchTransform, indices: np.ndarray, block: int, seed: list[int], length: int) -> Batch:
    """Returns the random numbers `[rows, ...]` of the rows with the indices `indices`."""
    first, last = indices[0] // block, indices[-1] // block
    blocks = [
        transform.draw(np.random.default_rng([*seed, number]), block, length) for number in range(first, last + 1)
    ]
    draws = blocks[0] if len(blocks) == 1 else {name: np.concatenate([x[name] for x in blocks]) for name in blocks[0]}
    if len(indices) == block * len(blocks):
        return draws
    return {name: values[indices - first * block] for name, values in draws.items()}
