"""The schema of a batch. A spec declares the arrays of a batch with their axes, dtypes and padding values.

A batch is a dict of arrays whose first axis is rows, so that `jax.jit` receives a plain dict. A `BatchSpec` describes
the dict. Parsing, padding, packing, the planner and the initialization of models derive the shapes of arrays from the
spec.
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
    """The maximum sizes of a row of a batch.

    Attributes:
      tokens: the maximum number of tokens.
      sequences: the maximum number of sequences in a packed row; 1 without packing.
      predictions: the maximum number of tokens that an objective predicts.
    """

    tokens: int
    sequences: int
    predictions: int = 0


class Axis(enum.Enum):
    """The axes of an array of a batch: the number of entries for a row."""

    ROW = "row"  # one entry: `[rows]`
    SEQUENCE = "sequence"  # one entry per sequence: `[rows]`, or packed `[rows, sequences]`
    TOKEN = "token"  # one entry per token: `[rows, tokens]`
    PREDICTION = "prediction"  # one entry per predicted token: `[rows, predictions]`


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The declaration of an array of a batch.

    Attributes:
      axis: whether the array has one entry per row, sequence, token or prediction.
      dtype: the NumPy dtype of the array.
      padding: the value of entries without a token, sequence or prediction.
      feature: the name of the array's feature in a record, as in Google's create_pretraining_data.py; empty if records
        do not contain the array.
      is_position: whether the values are positions of tokens in a sequence, one per prediction. Packing then adds the
        position at which the sequence starts in its row.
    """

    axis: Axis
    dtype: Any = np.int32
    padding: int = 0
    feature: str = ""
    is_position: bool = False

    def shape(self, row: RowSize, is_packed: bool) -> tuple[int, ...]:
        """Returns the shape of the array for one row, without the axis of rows.

        Args:
          row: the sizes of a row.
          is_packed: whether several sequences share a row, so that an array per sequence has the axis `[sequences]`.
        """
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
        """Returns the union of two specs. An array in both specs must have equal declarations."""
        if differing := [name for name in self.keys() & other.keys() if self[name] != other[name]]:
            name = min(differing)
            raise ValueError(f"batch_spec: {name!r} has two declarations, {self[name]} and {other[name]}; rename one")
        return BatchSpec(self.is_packed, **{**self, **other})

    def without(self, other: Mapping[str, ArraySpec]) -> "BatchSpec":
        """Returns the spec without the arrays whose names are in `other`."""
        return BatchSpec(self.is_packed, **{name: array for name, array in self.items() if name not in other})

    def packed(self) -> "BatchSpec":
        """Returns the spec of packed batches, in which several sequences share a row, with the arrays of packing.

        Packing adds `positions` `[rows, tokens]`, `first_tokens` `[rows, sequences]` and `dropout_rows` `[rows]`.
        """
        return BatchSpec(True, **(self | PACKING_ARRAYS))

    def abstract(self, rows: int, row: RowSize, sharding: "Sharding | None") -> "dict[str, jax.ShapeDtypeStruct]":
        """Returns the shapes and dtypes of a batch.

        Args:
          rows: the number of rows.
          row: the sizes of a row.
          sharding: the sharding of the arrays; None for no sharding.
        """
        import jax

        return {
            name: jax.ShapeDtypeStruct((rows, *array.shape(row, self.is_packed)), array.dtype, sharding=sharding)
            for name, array in self.items()
        }

    def padding_rows(self, rows: int, row: RowSize) -> Batch:
        """Returns a batch that contains only padding, to initialize a model.

        Args:
          rows: the number of rows.
          row: the sizes of a row.
        """
        return {
            name: np.full((rows, *array.shape(row, self.is_packed)), array.padding, array.dtype)
            for name, array in self.items()
        }

    def pad_rows(self, batch: Batch, rows: int) -> Batch:
        """Returns a batch of `rows` rows: the rows of `batch`, then rows of padding."""
        return {
            name: np.pad(
                values, [(0, rows - len(values))] + [(0, 0)] * (values.ndim - 1), constant_values=self[name].padding
            )
            for name, values in batch.items()
        }

    def select(self, batch: Batch) -> Batch:
        """Returns the arrays of a batch that this spec declares.

        Args:
          batch: {name: array}.

        Raises:
          ValueError: if a declared array is missing, or has another dtype.
        """
        for name, array in self.items():
            if name not in batch:
                raise ValueError(f"batch: the array {name!r} is missing, but the spec declares it")
            if batch[name].dtype != array.dtype:
                dtype = np.dtype(array.dtype)
                raise ValueError(
                    f"batch: the array {name!r} has dtype {batch[name].dtype}; expected {dtype} by the spec"
                )
        return {name: batch[name] for name in self}


def take_rows(batch: Batch, rows: np.ndarray) -> Batch:
    """Returns the rows with the indices `rows`, such as the rows of one host."""
    return {name: values[rows] for name, values in batch.items()}


def split_microbatches(arrays: Any, count: int) -> Any:
    """Returns a tree of arrays `[count, rows / count, ...]` from arrays `[rows, ...]`.

    A microbatch contains rows of all devices, so that no row is moved to another device.
    """
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), arrays)


def join_microbatches(arrays: Any) -> Any:
    """Returns a tree of arrays `[rows, ...]` from `[count, rows / count, ...]`. The inverse of `split_microbatches`."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), arrays)


# The predicted tokens. Padding has weight 0. Records contain these arrays with static masking. With dynamic masking, a
# transform adds these arrays.
WORD_ARRAYS = BatchSpec(
    word_positions=per_prediction(feature="masked_lm_positions", is_position=True),
    word_ids=per_prediction(feature="masked_lm_ids"),
    word_weights=per_prediction(np.float32, feature="masked_lm_weights"),
)
# The arrays of parsed records, in the order of the features in a record. The `sequence_weights` of a record that cannot
# be read are 0.
RECORD_ARRAYS = BatchSpec(
    input_ids=per_token(feature="input_ids"),
    segments=per_token(feature="input_mask"),  # 0 is padding; the sequences of a packed row have the numbers 1, 2, ...
    token_types=per_token(feature="segment_ids"),
    **WORD_ARRAYS,
    pair_labels=per_sequence(feature="next_sentence_labels"),
    sequence_weights=per_sequence(np.float32),
)
# The arrays that packing adds.
PACKING_ARRAYS = BatchSpec(
    positions=per_token(),  # the position of a token in its sequence
    first_tokens=per_sequence(),  # the position in the row of the first token of each sequence
    dropout_rows=per_row(),  # the row of the unpacked batch whose random keys a packed row uses in dropout
)
# 1 if a row of a stream continues the same row of the previous step, else 0.
STREAM_ARRAYS = BatchSpec(continues=per_sequence())
# The fraction of training steps that are completed, for auxiliary objectives.
PROGRESS_ARRAYS = BatchSpec(progress=per_row(np.float32))
# The name of the array `[rows]` with the first token of each row in the next step of a stream; -1 if the text does not
# continue. Transforms read this array. It is removed before the batch is moved to devices.
FOLLOWING = "following"
# Names of arrays that the train step or a stream adds to a batch: the weights of objectives, the token ids before the
# generator replaced tokens, the carry of the rows, and `FOLLOWING`.
RESERVED_NAMES = ("weights", "original_ids", "carry", FOLLOWING)


def record_arrays(masking: str) -> BatchSpec:
    """Returns the spec of the arrays in records, for a value of `config.data.masking`."""
    return RECORD_ARRAYS if masking == "static" else RECORD_ARRAYS.without(WORD_ARRAYS)
