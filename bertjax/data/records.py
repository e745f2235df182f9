"""TFRecords of pre-masked sequences in Google BERT's format, and the manifest stored with them."""

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import NamedTuple

import google_crc32c
import numpy as np
from etils import epath

from bertjax.config import UserError
from bertjax.data.serialization import tfrecords
from bertjax.files import replacing, write_whole

MANIFEST = "manifest.json"


def features(length: int, max_predictions_per_seq: int) -> dict[str, tuple[int, type]]:
    """Returns the size and type of each feature of a record, named as in Google's create_pretraining_data.py."""
    return {
        "input_ids": (length, np.int64),
        "input_mask": (length, np.int64),
        "segment_ids": (length, np.int64),
        "masked_lm_positions": (max_predictions_per_seq, np.int64),
        "masked_lm_ids": (max_predictions_per_seq, np.int64),
        "masked_lm_weights": (max_predictions_per_seq, np.float32),
        "next_sentence_labels": (1, np.int64),
    }


@dataclasses.dataclass(frozen=True)
class RecordSet:
    """TFRecord files with sequences of one length, and their record counts; in this order they form one list."""

    paths: tuple[str, ...]
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)


class Written(NamedTuple):  # STUB
    records: int
    bytes: int
    crc32c: str


def write_records(path: epath.PathLike, blocks: Iterable[dict[str, np.ndarray]]) -> Written:
    """Writes one TFRecord file; each block maps the names of `features` to arrays `[records, size]`."""
    count, size, checksum = 0, 0, 0
    with replacing(path) as partial, partial.open("wb") as file:
        for block in blocks:
            data = tfrecords(block)
            file.write(data)
            count, size = count + len(block["input_ids"]), size + len(data)
            checksum = google_crc32c.extend(checksum, data)
    return Written(count, size, f"{checksum:08x}")


def set_folder(length: int) -> str:
    return f"length{length}"


def read_manifest(folder: epath.PathLike) -> dict | None:
    """Returns the manifest of a folder of records; None if it has none, as records from Google's code do."""
    path = epath.Path(folder) / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text())
        return manifest if "sets" in manifest and "tokenizer" in manifest else _damaged(path)
    except json.JSONDecodeError:
        return _damaged(path)


def _damaged(path):
    raise UserError(f"{path}: not a manifest written by bertjax.prepare; prepare the records again")


def write_manifest(folder: epath.PathLike, manifest: dict) -> None:
    """Writes the manifest. Call this last: a folder with a manifest is complete."""
    write_whole(epath.Path(folder) / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def check_recipe(manifest: dict, recipe: dict, folder: epath.PathLike) -> None:
    """Raises `UserError` if the records were prepared with another recipe; names the flags that match them."""
    prepared = {"text_column": "text", **manifest["recipe"]}  # older manifests do not have it
    if wrong := {name: prepared.get(name) for name, value in recipe.items() if prepared.get(name) != value}:
        name, made_with = next(iter(wrong.items()))
        flags = " ".join(
            f"--config.data.{field}={','.join(value) if isinstance(value, list) else value}"
            for field, value in wrong.items()
        )
        raise UserError(
            f"config.data.{name} = {recipe[name]!r}: the records in {folder} were prepared with {made_with!r}; set "
            f"{flags}, or prepare new records in another folder"
        )


def require_folder(folder: epath.PathLike) -> epath.Path:
    """Returns the folder. Raises `UserError` if it does not exist."""
    folder = epath.Path(folder)
    if not folder.is_dir():
        raise UserError(f"config.data.records: no folder {str(folder)!r}; create it with bertjax.prepare")
    return folder


def find_records(
    folder: epath.PathLike,
    length: int,
    max_predictions_per_seq: int,
    split: str,
    vocab_size: int | None = None,
    *,
    counts: epath.PathLike | None = None,
) -> RecordSet | None:
    """Returns the records of `split` ("train" or "heldout") for one length; None if no records are held out.

    Files without a manifest are expected in the folder or in its subfolder `length<N>`; a name that contains "heldout"
    marks held-out files. Counting their records reads the files. `counts` is a JSON file that caches the counts: a file
    of unchanged size is not read again.

    Raises `UserError` if there are no files, if some are missing, or if they have another length or vocabulary.
    """
    folder = require_folder(folder)
    if manifest := read_manifest(folder):
        found = manifest["sets"].get(str(length))
        if not found:
            have = ", ".join(manifest["sets"])
            raise UserError(f"config.stages: the records in {folder} have length {have}, not {length}; prepare them")
        if found["max_predictions_per_seq"] != max_predictions_per_seq:
            raise UserError(
                f"config.stages: max_predictions_per_seq = {max_predictions_per_seq}, but the records of length "
                f"{length} in {folder} were prepared with {found['max_predictions_per_seq']}"
            )
        files = found[split]
        paths = tuple(str(folder / name) for name in files)
        for path in paths:
            if not epath.Path(path).exists():
                raise UserError(f"{path}: missing, but listed in {folder / MANIFEST}; copy or prepare it again")
        return (
            RecordSet(paths, tuple(f if isinstance(f, int) else f["records"] for f in files.values()))
            if files
            else None
        )

    own = folder / set_folder(length)
    paths = [str(p) for p in (own if own.is_dir() else folder).iterdir() if "tfrecord" in p.name.lower()]
    paths = sorted(p for p in paths if ("heldout" in epath.Path(p).name) == (split == "heldout"))
    if not paths and split == "heldout":
        return None
    if not paths:
        raise UserError(f"config.data.records: no TFRecord files (*.tfrecord*) in {folder}")
    for path in paths:
        if (numbered := re.search(r"-of-(\d+)", epath.Path(path).name)) and len(paths) < int(numbered[1]):
            raise UserError(f"{own}: {len(paths)} of {int(numbered[1])} files; prepare or copy the records again")
    check_record(paths[0], length, max_predictions_per_seq, vocab_size)
    return RecordSet(tuple(paths), _count_all(paths, counts))


def parse(serialized, length: int, max_predictions_per_seq: int):
    """Parses `[batch]` serialized examples into the arrays of `features`, integers as int32. Runs inside tf.data."""
    from bertjax.data.tf import tf

    sizes = features(length, max_predictions_per_seq)
    spec = {name: tf.io.FixedLenFeature([size], tf.as_dtype(dtype)) for name, (size, dtype) in sizes.items()}
    batch = tf.io.parse_example(serialized, spec)
    batch = {name: tf.cast(x, tf.int32) if x.dtype == tf.int64 else x for name, x in batch.items()}
    batch["next_sentence_labels"] = batch["next_sentence_labels"][:, 0]
    return batch


def check_record(path: str, length: int, max_predictions_per_seq: int, vocab_size: int | None = None) -> None:
    """Raises `UserError` if the first record of a file does not match the config."""
    import google.protobuf.message

    from bertjax.data.tf import tf

    try:
        first = next(iter(tf.data.TFRecordDataset(path).take(1).as_numpy_iterator()), None)
    except tf.errors.DataLossError:
        raise UserError(f"{path}: not a TFRecord file, or damaged") from None
    if first is None:
        raise UserError(f"{path}: contains no records")
    try:
        found = tf.train.Example.FromString(first).features.feature
    except google.protobuf.message.DecodeError:
        raise UserError(f"{path}: its records are not tf.train.Examples") from None
    for name, (size, _) in features(length, max_predictions_per_seq).items():
        values = found[name].float_list.value or found[name].int64_list.value
        if len(values) != size:
            field = "max_predictions_per_seq" if name.startswith("masked") else "length"
            raise UserError(
                f"config.stages: {field} = {size}, but {name} in {path} has {len(values)} values; "
                f"set it to that value, or prepare the records again"
            )
    if vocab_size and (largest := max(found["input_ids"].int64_list.value)) >= vocab_size:
        raise UserError(
            f"config.model.vocab_size = {vocab_size}: the records in {path} contain token id {largest}; they were made "
            f"with another vocabulary"
        )


def count_records(path: str) -> int:
    """Counts the records of a file. Raises `UserError` if it is damaged."""
    from bertjax.data.tf import tf

    try:
        sizes = tf.data.TFRecordDataset(path, buffer_size=1 << 22).batch(4096).map(tf.size)
        return int(sizes.reduce(0, lambda total, size: total + size).numpy())
    except tf.errors.DataLossError as error:
        raise UserError(f"{path}: damaged ({error.message.split(';')[0]}); copy or prepare it again") from None


def _count_all(paths: list[str], counts: epath.PathLike | None) -> tuple[int, ...]:
    """Counts the records of each file, or takes the count from `counts` if the file size has not changed."""
    known = _read_counts(counts) if counts is not None else {}
    sizes = {path: epath.Path(path).stat().length for path in paths}
    missing = [path for path in paths if path not in known or known[path]["bytes"] != sizes[path]]
    known |= {path: {"bytes": sizes[path], "records": count_records(path)} for path in missing}
    if missing and counts is not None:
        write_whole(counts, json.dumps(known, indent=1) + "\n")
    return tuple(known[path]["records"] for path in paths)


def _read_counts(path: epath.PathLike) -> dict[str, dict[str, int]]:
    """Returns {path: {"bytes": size, "records": count}}; empty if the file is missing or invalid."""
    path = epath.Path(path)
    try:
        known = json.loads(path.read_text()) if path.exists() else {}
        return {name: {field: int(found[field]) for field in ("bytes", "records")} for name, found in known.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
