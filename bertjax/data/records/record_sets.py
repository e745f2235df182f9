"""Records of pre-training: sets of TFRecord files, found with or without a manifest, written, and counted."""

import collections
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import TypedDict

import google_crc32c
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import inside, parse_json, read_whole, replacing, write_whole
from bertjax.data.records import lengths
from bertjax.data.records.integrity import HEAD_BYTES, check_files, crc32c_of
from bertjax.data.records.layouts import Format, features
from bertjax.data.records.manifest import MANIFEST, Count, read_manifest
from bertjax.data.records.parsing import Records, Unfit
from bertjax.data.records.serialization import Damaged, Numbers, count_of, read_range, tfrecords

COUNTS, LENGTHS = "record_counts.json", "record_lengths"  # in the cache
MOST_COPIES = 16  # the source that is used least is repeated so often at most, see `mixed`
MIXTURE_ERROR = 0.01  # relative errors of weights below this do not matter


@dataclasses.dataclass(frozen=True)
class RecordSet:
    """TFRecord files with sequences of one length, and their record counts; in this order they form one list.

    Attributes:
      layout, masking: those of `config.data`; the defaults are what records from elsewhere have.
      vocab_size: the vocabulary size of the tokenizer that made the records; None if it is unknown.
      token_types: those of the model that reads them.
      on_corrupt: what a reader does at a record that cannot be read: stop, or skip it.
      lost: {path: numbers of records} that are skipped unread.
      lengths: tokens of each record `[total]`; None if they are unknown.
      sources: for each file, the source of the corpus that all of it is from; "" if it is not of one of several.
    """

    paths: tuple[str, ...]
    counts: tuple[int, ...]
    layout: str = "google"
    masking: str = "static"
    vocab_size: int | None = None
    on_corrupt: str = "stop"
    lost: Mapping[str, tuple[range, ...]] = dataclasses.field(default_factory=dict)
    lengths: np.ndarray | None = dataclasses.field(default=None, compare=False)
    sources: tuple[str, ...] = ()
    token_types: int = 2

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def sizes(self) -> dict[str, int]:
        """Records of each source."""
        found = collections.Counter()
        for source, count in zip(self.sources, self.counts):
            found[source] += count
        return dict(found)

    def by_source(self) -> dict[str, "RecordSet"]:
        """Returns the files of each source."""
        found: dict[str, list] = {}
        for path, count, source in zip(self.paths, self.counts, self.sources or [""] * len(self.paths)):
            found.setdefault(source, []).append((path, count))
        parts = {source: tuple(zip(*files)) for source, files in found.items()}
        return {s: dataclasses.replace(self, paths=p, counts=c, sources=(s,) * len(p)) for s, (p, c) in parts.items()}


def mixed(files: RecordSet, weights: Mapping[str, float]) -> RecordSet:
    """Returns the files of each source as often as its weight says, those of all sources spread over the list.

    Weights are made whole by a factor of at most `MOST_COPIES`, with which they come closest.
    """
    used = {source: weight for source, weight in weights.items() if weight and source in files.sources}
    least = min(used.values())
    copies = {source: weight / least for source, weight in used.items()}

    def error(factor: int) -> float:
        return max(abs(round(factor * n) / (factor * n) - 1) for n in copies.values())

    factor = min(range(1, MOST_COPIES + 1), key=lambda factor: (max(error(factor), MIXTURE_ERROR), factor))
    numbers = {source: [i for i, its in enumerate(files.sources) if its == source] for source in used}
    numbers = {source: found * round(factor * copies[source]) for source, found in numbers.items()}
    places = ((place / len(found), number) for found in numbers.values() for place, number in enumerate(found))
    order = [number for _, number in sorted(places)]
    per_file = None if files.lengths is None else np.split(files.lengths, np.cumsum(files.counts)[:-1])
    return dataclasses.replace(
        files,
        paths=tuple(files.paths[i] for i in order),
        counts=tuple(files.counts[i] for i in order),
        sources=tuple(files.sources[i] for i in order),
        lengths=None if per_file is None else np.concatenate([per_file[i] for i in order]),
    )


def write_records(path: epath.PathLike, blocks: Iterable[dict[str, np.ndarray | Numbers]]) -> dict[str, int]:
    """Writes one TFRecord file; returns its entry for the manifest: "records", "bytes", and its checksums.

    Each block maps names of features to arrays `[records, size]`, see `layouts.features_of`.
    """
    count, size, checksum, head = 0, 0, 0, b""
    with replacing(path) as partial, partial.open("wb") as file:
        for block in blocks:
            data = tfrecords(block)
            file.write(data)
            count, size = count + count_of(next(iter(block.values()))), size + len(data)
            checksum = google_crc32c.extend(checksum, data)
            head += data[: HEAD_BYTES - len(head)]
    if "://" not in str(path) and crc32c_of(path) != checksum:  # object stores have checksums of their own
        raise UserError(f"{path}: cannot be read back as it was written; check the disk")
    return dict(records=count, bytes=size, crc32c=checksum, head_crc32c=google_crc32c.value(head))


def set_folder(length: int) -> str:
    return f"length{length}"


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
    token_types: int = 2,
    on_corrupt: str = "stop",
    checksums: bool = False,
    cache: epath.PathLike | None = None,
    measures: bool = False,
) -> RecordSet | None:
    """Returns the records of `split` ("train" or "heldout") for one length; None if no records are held out.

    Files without a manifest are expected in the folder or in its subfolder `length<N>`; a name that contains "heldout"
    marks held-out files. Counting their records reads the files, and so does measuring their lengths, if `measures`; a
    folder `cache` keeps both: files of unchanged size are not read again.

    Raises `UserError` if there are no files, if some are missing, if they have another length or vocabulary, or if they
    are not what the manifest says, in size and beginning or, with `checksums`, anywhere; `on_corrupt="skip"` leaves out
    such files, unless all are.
    """
    folder = require_folder(folder)
    if manifest := read_manifest(folder):
        found = manifest["sets"].get(str(length))
        if not found:
            have = ", ".join(manifest["sets"])
            raise UserError(f"config.stages: the records in {folder} have length {have}, not {length}; prepare them")
        masking = manifest["recipe"].get("masking", "static")
        if masking == "static" and found["max_predictions_per_seq"] != max_predictions_per_seq:
            raise UserError(
                f"config.stages: max_predictions_per_seq = {max_predictions_per_seq}, but the records of length "
                f"{length} in {folder} were prepared with {found['max_predictions_per_seq']}"
            )
        if not found[split]:
            return None
        files = {
            str(inside(folder, name, folder / MANIFEST)): entry if isinstance(entry, dict) else {"records": entry}
            for name, entry in found[split].items()
        }
        found = RecordSet(
            tuple(files),
            tuple(entry["records"] for entry in files.values()),
            manifest.get("layout", "google"),
            masking,
            manifest["tokenizer"]["vocab_size"],
            on_corrupt,
            lost={path: (range(files[path]["records"]),) for path in _damaged_files(files, on_corrupt, checksums)},
            lengths=lengths.read(files) if split == "train" else None,
            sources=tuple(entry.get("source", "") for entry in files.values()),
            token_types=token_types,
        )
    else:
        paths = _find_files(folder, length, split)
        if checksums:
            raise UserError(f"config.data.checksums = True: the records in {folder} have no manifest; set it to False")
        if not paths:
            return None
        check_record(paths[0], length, max_predictions_per_seq, vocab_size)
        counts = _count_all(paths, None if cache is None else epath.Path(cache) / COUNTS)
        found = RecordSet(tuple(paths), counts, vocab_size=vocab_size, on_corrupt=on_corrupt, token_types=token_types)
    if measures and found.lengths is None:
        form = Format(length, max_predictions_per_seq, found.layout, found.masking, found.vocab_size)
        kept = None if cache is None else epath.Path(cache) / LENGTHS
        found = dataclasses.replace(found, lengths=lengths.measure(found.paths, found.counts, form, kept))
    return found


def _find_files(folder: epath.Path, length: int, split: str) -> list[str]:
    """Returns the files of `split` in a folder without a manifest; none if there are no held-out ones."""
    own = folder / set_folder(length)
    paths = [str(p) for p in (own if own.is_dir() else folder).iterdir() if "tfrecord" in p.name.lower()]
    paths = sorted(p for p in paths if ("heldout" in epath.Path(p).name) == (split == "heldout"))
    if not paths and split == "train":
        raise UserError(f"config.data.records: no TFRecord files (*.tfrecord*) in {folder}")
    for path in paths:
        if (numbered := re.search(r"-of-(\d+)", epath.Path(path).name)) and len(paths) < int(numbered[1]):
            raise UserError(f"{own}: {len(paths)} of {int(numbered[1])} files; prepare or copy the records again")
    return paths


def _damaged_files(files: dict[str, dict[str, int]], on_corrupt: str, checksums: bool) -> list[str]:
    """Returns the paths of files that are not what the manifest says, to be left out."""
    faults = check_files(files, reads_all=checksums)
    if faults and (on_corrupt == "stop" or len(faults) == len(files)):
        (path, fault), others = next(iter(faults.items())), len(faults) - 1
        also = f" (and {others} more files are damaged)" if others else ""
        raise UserError(f"{path}: {fault}{also}; copy or prepare it again")
    for path, fault in faults.items():
        print(f"{path}: {fault}; skipping its {files[path]['records']:,} records", flush=True)
    return list(faults)


def check_record(path: str, length: int, max_predictions_per_seq: int, vocab_size: int | None = None) -> None:
    """Raises `UserError` if the first record of a file does not match the config."""
    try:
        first = next(read_range(path, 0, None), None)
    except Damaged:
        raise UserError(f"{path}: not a TFRecord file, or damaged") from None
    if first is None:
        raise UserError(f"{path}: contains no records")
    sizes = features(length, max_predictions_per_seq)
    try:
        found = Records([first])
        counts = {name: found.count(name) for name in sizes}
        fits = all(counts[name] == size for name, (size, _) in sizes.items())
        largest = found.numbers("input_ids", length, np.int64).max() if fits else 0
    except Unfit:
        raise UserError(f"{path}: its records are not tf.train.Examples with packed lists") from None
    for name, (size, _) in sizes.items():
        if counts[name] != size:
            field = "max_predictions_per_seq" if name.startswith("masked") else "length"
            raise UserError(
                f"config.stages: {field} = {size}, but {name} in {path} has {counts[name]} values; "
                f"set it to that value, or prepare the records again"
            )
    if vocab_size and largest >= vocab_size:
        raise UserError(
            f"config.model.vocab_size = {vocab_size}: the records in {path} contain token id {largest}; they were made "
            f"with another vocabulary"
        )


def count_records(path: str) -> int:
    """Counts the records of a file. Raises `UserError` if it is damaged."""
    try:
        return sum(1 for _ in read_range(path))
    except Damaged as error:
        raise UserError(f"{path}: damaged ({error}); copy or prepare it again") from None


def _count_all(paths: list[str], counts: epath.PathLike | None) -> tuple[int, ...]:
    """Counts the records of each file, or takes the count from `counts` if the file size has not changed."""
    known = _read_counts(counts) if counts is not None else {}
    sizes = {path: epath.Path(path).stat().length for path in paths}
    missing = [path for path in paths if path not in known or known[path]["bytes"] != sizes[path]]
    known |= {path: {"bytes": sizes[path], "records": count_records(path)} for path in missing}
    if missing and counts is not None:
        write_whole(counts, json.dumps(known, indent=1) + "\n")
    return tuple(known[path]["records"] for path in paths)


class _Counted(TypedDict):
    bytes: Count
    records: Count


def _read_counts(path: epath.PathLike) -> dict[str, dict[str, int]]:
    """Returns {path: {"bytes": size, "records": count}}; empty if the file is missing or invalid."""
    path = epath.Path(path)
    try:
        return parse_json(read_whole(path), dict[str, _Counted]) if path.exists() else {}
    except ValueError:
        return {}
