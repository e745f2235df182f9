"""Transforms of the batches of a host, such as dynamic masking."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import Batch, BatchSpec


class BatchTransform(abc.ABC):
    """Adds arrays to a batch, or changes `input_ids`. A transform runs on the host, with NumPy arrays.

    A row of the result must depend only on the same row of the batch and of the random numbers: the batch of a step
    must be the same for any number of hosts. Rows are padded and not packed; packing runs after the transforms. All
    transforms of a batch read the original batch, and not the results of other transforms.
    """

    @abc.abstractmethod
    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the arrays that the transform adds or changes.

        Args:
          batch: the arrays of the records, which the method must not change: `input_ids`, `segments` and `token_types`,
            int32 `[rows, length]`; `pair_labels`, int32 `[rows]`; and `sequence_weights`, float32 `[rows]`. `segments`
            is 1 for a token and 0 for padding, which is at the end of a row.
          draws: the random numbers of these rows: {name: `[rows, ...]`} from `draw`.

        Returns:
          {name: array `[rows, ...]`} with the axes and dtypes of `Objective.batch_spec`, and perhaps `input_ids`.
        """

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> Batch:
        """Returns the random numbers that `__call__` needs; none by default.

        The random numbers of a row are drawn again each time the row is read. They are a function of the seed and of
        the index of the row in the order of training.

        Args:
          rng: the generator. The method must draw all random numbers from it.
          rows: the number of rows, which can be more than the rows of a batch.
          length: the length of a row in tokens, with padding.

        Returns:
          {name: array `[rows, ...]`}.
        """
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
