"""The features of a record in each layout.

The layout "google" has the padded features of Google's create_pretraining_data.py. In the layout "compact", each
feature is a string of little-endian numbers without padding. Instead of the token type of each token, a compact record
has the positions where the token type changes. Records for dynamic masking do not have the features of predictions.
"""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax.data.batch import RECORD_ARRAYS, RowSize, record_arrays
from bertjax.data.records.parsing import InvalidRecord, Records, feature_names
from bertjax.data.records.serialization import Numbers, read_tfrecords, tfrecords


class Format(NamedTuple):
    """The format of stored sequences.

    Attributes:
      length: the sequence length.
      max_predictions_per_seq: the largest number of predictions of a sequence.
      layout: "google" or "compact" (`config.data.layout`).
      masking: "static" or "dynamic" (`config.data.masking`).
      vocab_size: the vocabulary size of the tokenizer that made the records; None if it is unknown.
      token_types: the number of token types of the model, at least two.
    """

    length: int
    max_predictions_per_seq: int
    layout: str = "google"
    masking: str = "static"
    vocab_size: int | None = None
    token_types: int = 2


# {name of a feature of a record: name of an array of a batch}
ARRAY_OF_FEATURE = {array.feature: name for name, array in RECORD_ARRAYS.items() if array.feature}


def features(length: int, max_predictions_per_seq: int, masking: str = "static") -> dict[str, tuple[int, type]]:
    """Returns {feature of a record in the layout "google": (number of values, type)}."""
    row = RowSize(length, 1, max_predictions_per_seq)
    arrays = [array for array in record_arrays(masking).values() if array.feature]
    sizes = [math.prod(array.shape(row, is_packed=False)) for array in arrays]
    types = [np.float32 if array.dtype is np.float32 else np.int64 for array in arrays]
    return {array.feature: (size, dtype) for array, size, dtype in zip(arrays, sizes, types)}


def number_type(length: int, vocab_size: int) -> type:
    """Returns the type of positions and token ids in compact records, and in rows on disk."""
    return np.uint16 if max(length, vocab_size) <= 1 << 16 else np.int32


def features_of(rows: np.ndarray, layout: str, ends_with_cls: bool = False) -> dict[str, np.ndarray | Numbers]:
    """Returns the features of sequences for `record_sets.write_records`.

    Args:
      rows: `[rows]` of the type `preprocessing.rows.row_type`.
      layout: see `Format`.
      ends_with_cls: whether the last token is [CLS], with the token type 2.
    """
    is_masked = "masked" in (rows.dtype.names or ())
    # The positions where the token type increases by one.
    changes = [rows["first_size"], rows["size"] - 1] if ends_with_cls else [rows["first_size"]]
    type_starts = np.stack(changes, axis=1).astype(rows["first_size"].dtype)
    if layout == "compact":
        sizes: dict[str, np.ndarray | int] = {"ids": rows["size"], "first_size": len(changes), "label": 1}
        sizes |= {"positions": rows["masked"], "labels": rows["masked"]} if is_masked else {}
        arrays = {name: rows[name].reshape(len(rows), -1) for name in sizes} | {"first_size": type_starts}
        return {name: Numbers(arrays[name], np.broadcast_to(size, len(rows))) for name, size in sizes.items()}
    position = np.arange(rows["ids"].shape[1])
    is_token = position < rows["size"][:, None]
    arrays = {
        "input_ids": rows["ids"],
        "input_mask": is_token,
        "segment_ids": is_token * (position >= type_starts[..., None]).sum(1),
        "next_sentence_labels": rows["label"][:, None],
    }
    if is_masked:
        is_prediction = np.arange(rows["positions"].shape[1]) < rows["masked"][:, None]
        arrays |= {
            "masked_lm_positions": rows["positions"],
            "masked_lm_ids": rows["labels"],
            "masked_lm_weights": is_prediction.astype(np.float32),
        }
    return arrays


def empty_record(form: Format) -> bytes:
    """Returns a record without tokens."""
    dtype, fields = compact_dtype(form), ["ids", "first_size", "label"]
    fields += ["positions", "labels", "masked", "size"] if form.masking == "static" else ["size"]
    sizes = {"ids": form.length, "positions": form.max_predictions_per_seq, "labels": form.max_predictions_per_seq}
    row = np.zeros(1, [(name, dtype, sizes.get(name, ())) for name in fields])
    records = read_tfrecords(io.BytesIO(tfrecords(features_of(row, form.layout))))
    return next(record for record in records if record is not None)


def compact_dtype(form: Format) -> np.dtype:
    """Returns the type of the numbers in compact records."""
    return np.dtype(number_type(form.length, form.vocab_size or 1)).newbyteorder("<")


def parse_records(serialized: Sequence[bytes], form: Format) -> dict[str, np.ndarray]:
    """Parses serialized examples into the arrays of a batch. Integers become int32.

    Args:
      serialized: the records.
      form: the format of the records.

    Returns:
      The arrays of `RECORD_ARRAYS` that the records hold, `[records, ...]`. The parser adds `sequence_weights`, which
      are 0 for records without tokens and 1 for all other records.

    Raises:
      InvalidRecord: if a record does not have this format.
    """
    try:
        records = Records(serialized)
        arrays = (_parse_compact if form.layout == "compact" else _parse_google)(records, form)
    except InvalidRecord:
        if len(serialized) < 2:
            raise
        # A record is invalid, or the records have different features.
        return _parse_groups(serialized, form)
    batch = {ARRAY_OF_FEATURE[name]: values for name, values in arrays.items()}
    return {**batch, "sequence_weights": batch["segments"][:, 0].astype(np.float32)}


def parse_valid(records: Mapping[int, bytes | None], form: Format) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yields (numbers, batch) of records that can be parsed, and skips all other records.

    Args:
      records: {number: record}; None for a damaged record.
      form: the format of the records.
    """
    readable = {number: record for number, record in records.items() if record is not None}
    numbers = list(readable)
    try:
        parsed = parse_records(list(readable.values()), form) if readable else {}
    except InvalidRecord:
        half = len(numbers) // 2
        for part in (numbers[:half], numbers[half:]) if half else ():
            yield from parse_valid({number: records[number] for number in part}, form)
    else:
        if readable:
            yield numbers, parsed


def _parse_groups(serialized: Sequence[bytes], form: Format) -> dict[str, np.ndarray]:
    """Parses groups of records with the same features, or two halves if all records have the same features."""
    indices: dict[tuple[bytes, ...], list[int]] = {}
    for index, record in enumerate(serialized):
        indices.setdefault(feature_names(record), []).append(index)
    groups: list[Iterable[int]] = list(indices.values())
    if len(groups) == 1:
        groups = list(np.array_split(np.arange(len(serialized)), 2))
    parsed = [parse_records([serialized[index] for index in group], form) for group in groups]
    order = np.argsort(np.concatenate([np.asarray(group) for group in groups]))
    return {name: np.concatenate([batch[name] for batch in parsed])[order] for name in parsed[0]}


def _parse_google(records: Records, form: Format) -> dict[str, np.ndarray]:
    sizes = features(form.length, form.max_predictions_per_seq, form.masking)
    arrays = {name: records.numbers(name, size, dtype) for name, (size, dtype) in sizes.items()}
    arrays["next_sentence_labels"] = arrays["next_sentence_labels"][:, 0]
    return arrays


def _parse_compact(records: Records, form: Format) -> dict[str, np.ndarray]:
    dtype = compact_dtype(form)
    compact = {name: records.strings(name, dtype, most) for name, most in compact_sizes(form).items()}
    return google_features(compact, form, np.where)


def compact_sizes(form: Format) -> dict[str, int]:
    """Returns {feature of a compact record: largest number of values}."""
    sizes = {"ids": form.length, "first_size": 2, "label": 1}
    predictions = form.max_predictions_per_seq
    return sizes | {"positions": predictions, "labels": predictions} if form.masking == "static" else sizes


def google_features(compact: Mapping[str, tuple[Any, Any]], form: Format, where: Callable) -> dict[str, Any]:
    """Converts the features of compact records to features of the layout "google".

    Args:
      compact: for each feature of `compact_sizes`, the numbers, int32 `[records, most]`, padded with 0; and the number
        of values of each record, `[records]`.
      form: the format of the records.
      where: `where` of the library of the arrays, NumPy or TensorFlow.
    """
    zero, one = np.int32(0), np.int32(1)
    (ids, size), (type_starts, types) = compact["ids"], compact["first_size"]
    position = np.arange(form.length, dtype=np.int32)
    is_token = size[:, None] > position
    is_later_type = [(type_starts[:, i, None] <= position) & (types[:, None] > i) & is_token for i in range(2)]
    arrays = {
        "input_ids": ids,
        "input_mask": where(is_token, one, zero),
        "segment_ids": where(is_later_type[0], one, zero) + where(is_later_type[1], one, zero),
        "next_sentence_labels": compact["label"][0][:, 0],
    }
    if form.masking == "static":
        labels, masked = compact["labels"]
        is_prediction = masked[:, None] > np.arange(form.max_predictions_per_seq, dtype=np.int32)
        arrays |= {
            "masked_lm_positions": compact["positions"][0],
            "masked_lm_ids": labels,
            "masked_lm_weights": where(is_prediction, np.float32(1), np.float32(0)),
        }
    return arrays
