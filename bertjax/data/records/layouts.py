"""What a record holds, in each layout.

google: the features of Google's create_pretraining_data.py, padded. compact: each feature is a string of numbers,
little-endian and without padding, which the reader pads; in place of token types it has the sizes at which they
change. With dynamic masking, records lack what is masked.
"""

import io
from typing import NamedTuple

import numpy as np

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


def features(length: int, max_predictions_per_seq: int, masking: str = "static") -> dict[str, tuple[int, type]]:
    """Returns the size and type of each feature of a record, named as in Google's create_pretraining_data.py."""
    sizes = {
        "input_ids": (length, np.int64),
        "input_mask": (length, np.int64),
        "segment_ids": (length, np.int64),
        "masked_lm_positions": (max_predictions_per_seq, np.int64),
        "masked_lm_ids": (max_predictions_per_seq, np.int64),
        "masked_lm_weights": (max_predictions_per_seq, np.float32),
        "next_sentence_labels": (1, np.int64),
    }
    return {name: size for name, size in sizes.items() if masking == "static" or not name.startswith("masked_lm")}


# The arrays of a batch, by the features that they come from.
NAMES_IN_BATCH = {
    "input_ids": "input_ids",
    "input_mask": "segments",
    "segment_ids": "token_types",
    "masked_lm_positions": "word_positions",
    "masked_lm_ids": "word_ids",
    "masked_lm_weights": "word_weights",
    "next_sentence_labels": "pair_labels",
}


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
    number, fields = _number(form), ["ids", "first_size", "label"]
    fields += ["positions", "labels", "masked", "size"] if form.masking == "static" else ["size"]
    sizes = dict(ids=form.length, positions=form.max_predictions_per_seq, labels=form.max_predictions_per_seq)
    row = np.zeros(1, [(name, number, sizes.get(name, ())) for name in fields])
    return next(read_tfrecords(io.BytesIO(tfrecords(features_of(row, form.layout)))))


def _number(form: Format) -> np.dtype:
    return np.dtype(number_type(form.length, form.vocab_size or 1)).newbyteorder("<")


def parse(serialized, form: Format):
    """Parses `[batch]` serialized examples into the arrays of a batch, integers as int32. Runs inside tf.data.

    Their names are those of `NAMES_IN_BATCH`. Labels are `[batch]`, and so are the added `sequence_weights`: 0 for rows
    without tokens, else 1.
    """
    found = (_parse_compact if form.layout == "compact" else _parse_google)(serialized, form)
    from bertjax.data.tf import tf

    batch = {NAMES_IN_BATCH[name]: values for name, values in found.items()}
    return {**batch, "sequence_weights": tf.cast(batch["segments"][:, 0], tf.float32)}


def _parse_google(serialized, form: Format):
    from bertjax.data.tf import tf

    sizes = features(form.length, form.max_predictions_per_seq, form.masking)
    spec = {name: tf.io.FixedLenFeature([size], tf.as_dtype(dtype)) for name, (size, dtype) in sizes.items()}
    batch = tf.io.parse_example(serialized, spec)
    batch = {name: tf.cast(x, tf.int32) if x.dtype == tf.int64 else x for name, x in batch.items()}
    batch["next_sentence_labels"] = batch["next_sentence_labels"][:, 0]
    return batch


def _parse_compact(serialized, form: Format):
    from bertjax.data.tf import tf

    number = _number(form)
    names = ["ids", "first_size", "label"] + (["positions", "labels"] if form.masking == "static" else [])
    found = tf.io.parse_example(serialized, {name: tf.io.FixedLenFeature([], tf.string) for name in names})

    def padded(name, size):
        dtype = tf.as_dtype(number.newbyteorder("="))
        return tf.cast(tf.io.decode_raw(found[name], dtype, fixed_length=size * number.itemsize), tf.int32)

    def sizes(name):
        return tf.strings.length(found[name])[:, None] // number.itemsize

    place = tf.range(form.length)
    inside = place < sizes("ids")
    batch = {
        "input_ids": padded("ids", form.length),
        "input_mask": tf.cast(inside, tf.int32),
        "segment_ids": tf.where(inside, _types(padded("first_size", 2), sizes("first_size"), place), 0),
        "next_sentence_labels": padded("label", 1)[:, 0],
    }
    if form.masking == "static":
        used = tf.range(form.max_predictions_per_seq) < sizes("labels")
        batch |= {
            "masked_lm_positions": padded("positions", form.max_predictions_per_seq),
            "masked_lm_ids": padded("labels", form.max_predictions_per_seq),
            "masked_lm_weights": tf.cast(used, tf.float32),
        }
    return batch


def _types(ends, count, place):
    """Returns the token types of places `[length]`, which change at `count` `[batch, 1]` of the ends `[batch, 2]`."""
    from bertjax.data.tf import tf

    is_past = (place >= ends[..., None]) & (tf.range(2)[:, None] < count[..., None])
    return tf.reduce_sum(tf.cast(is_past, tf.int32), 1)
