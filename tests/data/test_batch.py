"""The schema of a batch: shapes, packing, padding, and mistakes in a spec."""

import jax
import numpy as np
import pytest

from bertjax.data.batch import (
    RECORD_ARRAYS,
    WORD_ARRAYS,
    ArraySpec,
    Axis,
    BatchSpec,
    RowSize,
    join_microbatches,
    per_row,
    per_sequence,
    per_token,
    record_arrays,
    split_microbatches,
    take_rows,
)
from bertjax.data.loading.packing import pack
from bertjax.data.records import layouts

ROW = RowSize(tokens=6, sequences=3, predictions=2)
SPEC = BatchSpec(
    input_ids=per_token(),
    segments=per_token(),
    score=per_sequence(np.float32),
    rank=ArraySpec(Axis.SEQUENCE, np.int32, padding=-1),
    share=per_row(np.float32),
)


def test_shapes_and_types_follow_from_the_axis():
    shapes = {name: (x.shape, x.dtype) for name, x in SPEC.abstract(4, ROW, None).items()}
    assert shapes["input_ids"] == ((4, 6), np.int32) and shapes["score"] == ((4,), np.float32)
    packed = {name: x.shape for name, x in SPEC.packed().abstract(4, ROW, None).items()}
    assert packed["score"] == (4, 3) and packed["share"] == (4,) and packed["positions"] == (4, 6)
    assert packed.keys() - SPEC.keys() == {"positions", "first_tokens", "dropout_rows"}
    assert WORD_ARRAYS.abstract(4, ROW, None)["word_ids"].shape == (4, 2)
    assert {name: x.shape for name, x in SPEC.padding_rows(1, ROW).items()}["rank"] == (1,)


def test_rows_and_packed_positions_without_values_are_padding():
    batch = SPEC.padding_rows(3, ROW)
    batch["segments"][:, :2], batch["input_ids"][:, :2] = 1, np.arange(6).reshape(3, 2) + 5
    batch["rank"][:], batch["score"][:] = [7, 8, 9], 0.5
    padded = SPEC.pad_rows(batch, 5)
    assert padded["rank"].tolist() == [7, 8, 9, -1, -1] and padded["score"].tolist() == [0.5] * 3 + [0.0] * 2
    spec = SPEC.without({"share": None}).packed()
    packed = pack(batch, spec, np.arange(3), np.array([0, 0, 1]), np.array([0, 2, 0]), 2, ROW)
    assert packed["rank"].tolist() == [[7, 8, -1], [9, -1, -1]]
    assert packed["input_ids"].tolist() == [[5, 6, 7, 8, 0, 0], [9, 10, 0, 0, 0, 0]]
    assert packed["segments"].tolist() == [[1, 1, 2, 2, 0, 0], [1, 1, 0, 0, 0, 0]]
    assert packed.keys() == spec.keys() and packed["dropout_rows"].tolist() == [0, 2]


def test_a_batch_has_exactly_the_arrays_of_its_spec():
    batch = SPEC.padding_rows(2, ROW)
    assert SPEC.select(batch | {"more": np.zeros(2)}).keys() == SPEC.keys()
    with pytest.raises(ValueError, match="the array 'score' is missing"):
        SPEC.select({name: x for name, x in batch.items() if name != "score"})
    with pytest.raises(ValueError, match="the array 'score' has dtype float64; expected float32"):
        SPEC.select(batch | {"score": np.zeros(2)})
    with pytest.raises(ValueError, match="'score' has two declarations"):
        SPEC | BatchSpec(score=per_token())
    assert (SPEC | BatchSpec(score=per_sequence(np.float32))).keys() == SPEC.keys()


def test_microbatches_split_the_rows_of_every_device_and_merge_again():
    batch = {"x": np.arange(8), "y": np.arange(16).reshape(8, 2)}
    parts = split_microbatches(batch, 4)
    assert parts["x"].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]] and parts["y"].shape == (4, 2, 2)
    jax.tree.map(np.testing.assert_array_equal, join_microbatches(parts), batch)
    assert take_rows(batch, np.array([1, 3]))["y"].tolist() == [[2, 3], [6, 7]]


def test_records_have_googles_features():
    features = layouts.features(128, 20)
    assert list(features.items()) == [
        ("input_ids", (128, np.int64)),
        ("input_mask", (128, np.int64)),
        ("segment_ids", (128, np.int64)),
        ("masked_lm_positions", (20, np.int64)),
        ("masked_lm_ids", (20, np.int64)),
        ("masked_lm_weights", (20, np.float32)),
        ("next_sentence_labels", (1, np.int64)),
    ]
    assert not any(name.startswith("masked") for name in layouts.features(128, 20, "dynamic"))
    assert RECORD_ARRAYS.keys() - record_arrays("dynamic").keys() == WORD_ARRAYS.keys()
