"""The schema of a batch. Each array of a batch is declared once, with its axis, its type and its padding.

A batch is a dict of arrays whose first axis is rows, so that `jax.jit` receives a plain dict. A `BatchSpec` describes
the dict. Parsing, padding, packing, the shapes that the planner compiles for, and the arrays that initialize a model
follow from the spec.
"""

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding

Batch = dict[str, np.ndarray]  # {name: `[rows, ...]`}


class RowSize(NamedTuple):
    """The most that a row of a batch can hold.

    Attributes:
      tokens: tokens of the row.
      sequences: sequences that share the row; 1 without packing.
      predictions: tokens that an objective predicts.
    """

    tokens: int
    sequences: int
    predictions: int = 0


class Axis(enum.Enum):
    """The entries of an array for each row of a batch."""

    ROW = "row"  # one entry: `[rows]`
    SEQUENCE = "sequence"  # one entry per sequence: `[rows]`, and in packed rows `[rows, sequences]`
    TOKEN = "token"  # `[rows, tokens]`
    PREDICTION = "prediction"  # one entry per predicted token: `[rows, predictions]`


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The declaration of an array of a batch.

    Attributes:
      axis: the entries for each row.
      dtype: the type of the array.
      padding: the value where a row has no token, sequence or prediction.
      feature: the name of the feature of a record that holds the array, as in Google's create_pretraining_data.py;
        empty if records do not hold it.
      is_position: the values are positions of tokens, per prediction. A packed row adds the position where the sequence
        begins.
    """

    axis: Axis
    dtype: Any = np.int32
    padding: int = 0
    feature: str = ""
    is_position: bool = False

    def shape(self, row: RowSize, is_packed: bool) -> tuple[int, ...]:
        """Returns the shape of the entries of one row."""
        if self.axis is Axis.TOKEN:
            return (row.tokens,)
        if self.axis is Axis.PREDICTION:
            return (row.predictions,)
        return (row.sequences,) if is_packed and self.axis is Axis.SEQUENCE else ()


def per_row(dtype: Any = np.int32) -> ArraySpec:
    """Declares an array with one entry per row, `[rows]`."""
    return ArraySpec(Axis.ROW, dtype)


def per_sequence(dtype: Any = np.int32, **options: Any) -> ArraySpec:
    """Declares an array with one entry per sequence, `[rows]` or packed `[rows, sequences]`."""
    return ArraySpec(Axis.SEQUENCE, dtype, **options)


def per_token(dtype: Any = np.int32, **options: Any) -> ArraySpec:
    """Declares an array with one entry per token, `[rows, tokens]`."""
    return ArraySpec(Axis.TOKEN, dtype, **options)


def per_prediction(dtype: Any = np.int32, **options: Any) -> ArraySpec:
    """Declares an array with one entry per predicted token, `[rows, predictions]`."""
    return ArraySpec(Axis.PREDICTION, dtype, **options)


class BatchSpec(Mapping[str, ArraySpec]):
    """The arrays of a batch: {name: ArraySpec}.

    Args:
      is_packed: whether several sequences share a row.
      **arrays: the declaration of each array by its name.
    """

    def __init__(self, is_packed: bool = False, /, **arrays: ArraySpec) -> None:
        self.is_packed, self._arrays = is_packed, arrays

    def __getitem__(self, name: str) -> ArraySpec:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return f"BatchSpec({', '.join(self)})"

    def __or__(self, other: Mapping[str, ArraySpec]) -> "BatchSpec":
        """Returns the spec with the arrays of both. Equal names must have equal declarations."""
        if differing := [name for name in self.keys() & other.keys() if self[name] != other[name]]:
            raise ValueError(f"two declarations of the array {min(differing)!r}")
        return BatchSpec(self.is_packed, **{**self, **other})

    def without(self, other: Mapping[str, ArraySpec]) -> "BatchSpec":
        """Returns the spec without the arrays of another one."""
        return BatchSpec(self.is_packed, **{name: array for name, array in self.items() if name not in other})

    def packed(self) -> "BatchSpec":
        """Returns the spec of the same batches with several sequences in a row."""
        return BatchSpec(True, **(self | PACKING_ARRAYS))

    def abstract(self, rows: int, row: RowSize, sharding: "Sharding | None") -> "dict[str, jax.ShapeDtypeStruct]":
        """Returns the shapes, types and shardings of a batch of `rows` rows."""
        import jax

        return {
            name: jax.ShapeDtypeStruct((rows, *array.shape(row, self.is_packed)), array.dtype, sharding=sharding)
            for name, array in self.items()
        }

    def padding_rows(self, rows: int, row: RowSize) -> Batch:
        """Returns a batch whose rows are all padding, such as the batch that initializes a model."""
        return {
            name: np.full((rows, *array.shape(row, self.is_packed)), array.padding, array.dtype)
            for name, array in self.items()
        }

    def pad_rows(self, batch: Batch, rows: int) -> Batch:
        """Returns a batch with rows of padding at its end, `rows` in all."""
        return {
            name: np.pad(
                values, [(0, rows - len(values))] + [(0, 0)] * (values.ndim - 1), constant_values=self[name].padding
            )
            for name, values in batch.items()
        }

    def select(self, batch: Batch) -> Batch:
        """Returns the arrays of this spec. Raises `ValueError` if the batch lacks one, or has it with another type."""
        for name, array in self.items():
            if name not in batch:
                raise ValueError(f"batches lack the array {name!r}, which their spec declares")
            if batch[name].dtype != array.dtype:
                dtype = np.dtype(array.dtype)
                raise ValueError(f"the array {name!r} has the type {batch[name].dtype}; its spec declares {dtype}")
        return {name: batch[name] for name in self}


def take_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """Returns some rows of a batch, such as the rows of one host."""
    return {name: values[rows] for name, values in batch.items()}


def split_microbatches(arrays: Any, count: int) -> Any:
    """Returns a tree of arrays `[count, rows / count, ...]` from arrays `[rows, ...]`.

    Each microbatch takes rows of all devices, so that no row moves to another device.
    """
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), arrays)


def join_microbatches(arrays: Any) -> Any:
    """Returns a tree of arrays `[rows, ...]` from the arrays of microbatches. This is the inverse of the split."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), arrays)


# The predicted tokens. Weights are 0 where there is no prediction. Records hold these arrays with static masking;
# otherwise a transform adds them.
WORD_ARRAYS = BatchSpec(
    word_positions=per_prediction(feature="masked_lm_positions", is_position=True),
    word_ids=per_prediction(feature="masked_lm_ids"),
    word_weights=per_prediction(np.float32, feature="masked_lm_weights"),
)
# The arrays of parsed records, in the order of the features in a record. A record that cannot be read has the sequence
# weight 0.
RECORD_ARRAYS = BatchSpec(
    input_ids=per_token(feature="input_ids"),
    segments=per_token(feature="input_mask"),  # 0 is padding; a packed row numbers its sequences from 1
    token_types=per_token(feature="segment_ids"),
    **WORD_ARRAYS,
    pair_labels=per_sequence(feature="next_sentence_labels"),
    sequence_weights=per_sequence(np.float32),
)
# The arrays that packing adds.
PACKING_ARRAYS = BatchSpec(
    positions=per_token(),  # of each token in its sequence
    first_tokens=per_sequence(),  # the position in the row of the first token of each sequence
    dropout_rows=per_row(),  # the row of the padded batch that gives each row its random numbers
)
# 1 where a row of a stream continues the row of the step before.
STREAM_ARRAYS = BatchSpec(continues=per_sequence())
# The share of all steps that are done, for auxiliary objectives.
PROGRESS_ARRAYS = BatchSpec(progress=per_row(np.float32))
# The first token of the next step in each row of a stream; -1 if the row does not continue. Transforms read this array,
# which does not reach the devices.
FOLLOWING = "following"
# Names that a compiled step adds to a batch: weights of the objectives, the token ids before a generator has replaced
# some, and the carry of the rows.
RESERVED_NAMES = ("weights", "original_ids", "carry", FOLLOWING)


def record_arrays(masking: str) -> BatchSpec:
    """Returns the arrays that records hold, by `config.data.masking`."""
    return RECORD_ARRAYS if masking == "static" else RECORD_ARRAYS.without(WORD_ARRAYS)
