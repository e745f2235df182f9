"""What a record holds, in each layout.

google: the features of Google's create_pretraining_data.py, padded. compact: each feature is a string of numbers,
little-endian and without padding, which the reader pads; in place of token types it has the sizes at which they
change. With dynamic masking, records lack what is masked.
"""

import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import RECORD_ARRAYS, RowSize, record_arrays
from bertjax.data.records.parsing import Records, Unfit, order_of
from bertjax.data.records.serialization import Numbers, read_tfrecords, tfrecords


class Format(NamedTuple):
    """How sequences are stored: `config.data.layout` and `config.data.masking`, and the shape of a sequence.

    Attributes:
      vocab_size: the vocabulary size of the tokenizer that made the records; None if it is unknown.
      token_types: how many the model has; at least two.
    """

    length: int
    max_predictions_per_seq: int
    layout: str = "google"
    masking: str = "static"
    vocab_size: int | None = None
    token_types: int = 2


# {name of a feature of a record: name of the array of a batch}
ARRAY_OF_FEATURE = {array.feature: name for name, array in RECORD_ARRAYS.items() if array.feature}


def features(length: int, max_predictions_per_seq: int, masking: str = "static") -> dict[str, tuple[int, type]]:
    """Returns {feature of a record: (number of values, type)}, named as in Google's create_pretraining_data.py."""
    row = RowSize(length, 1, max_predictions_per_seq)
    arrays = [array for array in record_arrays(masking).values() if array.feature]
    sizes = [math.prod(array.shape(row, is_packed=False)) for array in arrays]
    types = [np.float32 if array.dtype is np.float32 else np.int64 for array in arrays]
    return {array.feature: (size, dtype) for array, size, dtype in zip(arrays, sizes, types)}


def number_type(length: int, vocab_size: int) -> type:
    """The type of positions and token ids, in compact records and in rows on disk."""
    return np.uint16 if max(length, vocab_size) <= 1 << 16 else np.int32


def features_of(rows: np.ndarray, layout: str, ends_with_cls: bool = False) -> dict[str, np.ndarray | Numbers]:
    """Returns the features of sequences `[rows]` of `sequences.row_type`, for `records.write_records`.

    `ends_with_cls`: their last token is [CLS], and of type 2.
    """
    is_masked = "masked" in rows.dtype.names
    ends = [
        rows["first_size"],
        *([rows["size"] - 1] if ends_with_cls else []),
    ]  # where types but the last end
    ends = np.stack(ends, axis=1).astype(rows["first_size"].dtype)
    if layout == "compact":
        sizes = {"ids": rows["size"], "first_size": ends.shape[1], "label": 1}
        sizes |= dict(positions=rows["masked"], labels=rows["masked"]) if is_masked else {}
        arrays = {name: rows[name].reshape(len(rows), -1) for name in sizes} | {"first_size": ends}
        return {name: Numbers(arrays[name], np.broadcast_to(size, len(rows))) for name, size in sizes.items()}
    token = np.arange(rows["ids"].shape[1])
    inside = token < rows["size"][:, None]
    found = {
        "input_ids": rows["ids"],
        "input_mask": inside,
        "segment_ids": inside * (token >= ends[..., None]).sum(1),
        "next_sentence_labels": rows["label"][:, None],
    }
    if is_masked:
        used = np.arange(rows["positions"].shape[1]) < rows["masked"][:, None]
        found |= {
            "masked_lm_positions": rows["positions"],
            "masked_lm_ids": rows["labels"],
            "masked_lm_weights": used.astype(np.float32),
        }
    return found


def empty_record(form: Format) -> bytes:
    """Returns a record without tokens, as its rows would be."""
    number, fields = number_of(form), ["ids", "first_size", "label"]
    fields += ["positions", "labels", "masked", "size"] if form.masking == "static" else ["size"]
    sizes = dict(ids=form.length, positions=form.max_predictions_per_seq, labels=form.max_predictions_per_seq)
    row = np.zeros(1, [(name, number, sizes.get(name, ())) for name in fields])
    return next(read_tfrecords(io.BytesIO(tfrecords(features_of(row, form.layout)))))


def number_of(form: Format) -> np.dtype:
    """Returns the type of the numbers in compact records."""
    return np.dtype(number_type(form.length, form.vocab_size or 1)).newbyteorder("<")


def parse(serialized: Sequence[bytes], form: Format) -> dict[str, np.ndarray]:
    """Parses serialized examples into the arrays of a batch, `[records, ...]`, integers as int32.

    Their names are the names in `RECORD_ARRAYS`. Labels are `[records]`, and so are the added `sequence_weights`: 0 for
    rows without tokens, else 1. Raises `Unfit` if a record is not of this form.
    """
    try:
        records = Records(serialized)
        found = (_parse_compact if form.layout == "compact" else _parse_google)(records, form)
    except Unfit:  # all of them, one of them, or they only differ from each other
        if len(serialized) < 2:
            raise
        parts: dict[object, list[int]] = {}
        for number, record in enumerate(serialized):
            parts.setdefault(order_of(record), []).append(number)
        if len(parts) == 1:
            parts = dict(enumerate(np.array_split(np.arange(len(serialized)), 2)))
        parsed = [parse([serialized[number] for number in numbers], form) for numbers in parts.values()]
        places = np.argsort(np.concatenate(list(parts.values())))
        return {name: np.concatenate([part[name] for part in parsed])[places] for name in parsed[0]}
    batch = {ARRAY_OF_FEATURE[name]: values for name, values in found.items()}
    return {**batch, "sequence_weights": batch["segments"][:, 0].astype(np.float32)}


def _parse_google(records: Records, form: Format) -> dict[str, np.ndarray]:
    sizes = features(form.length, form.max_predictions_per_seq, form.masking)
    batch = {name: records.numbers(name, size, dtype) for name, (size, dtype) in sizes.items()}
    batch["next_sentence_labels"] = batch["next_sentence_labels"][:, 0]
    return batch


def _parse_compact(records: Records, form: Format) -> dict[str, np.ndarray]:
    number, most, place = number_of(form), form.max_predictions_per_seq, np.arange(form.length)
    ids, size = records.strings("ids", number, form.length)
    ends, count = records.strings("first_size", number, 2)
    inside = place < size[:, None]
    is_past = (place >= ends[..., None]) & (np.arange(2)[:, None] < count[:, None, None])
    batch = {
        "input_ids": ids,
        "input_mask": inside.astype(np.int32),
        "segment_ids": np.where(inside, is_past.sum(1, dtype=np.int32), 0),
        "next_sentence_labels": records.strings("label", number, 1)[0][:, 0],
    }
    if form.masking == "static":
        labels, used = records.strings("labels", number, most)
        batch |= {
            "masked_lm_positions": records.strings("positions", number, most)[0],
            "masked_lm_ids": labels,
            "masked_lm_weights": (np.arange(most) < used[:, None]).astype(np.float32),
        }
    return batch
