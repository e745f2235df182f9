"""Sets of TFRecord files for pre-training: finds files with or without a manifest, writes files, counts records."""

import collections
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

import google_crc32c
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import inside, parse_json, read_whole, replacing, write_whole
from bertjax.data.records import lengths
from bertjax.data.records.integrity import HEAD_BYTES, check_files, crc32c_of
from bertjax.data.records.layouts import Format, features
from bertjax.data.records.manifest import MANIFEST, Count, Manifest, read_manifest
from bertjax.data.records.parsing import InvalidRecord, Records
from bertjax.data.records.serialization import DamagedRecord, Numbers, count_of, read_range, tfrecords

COUNTS, LENGTHS = "record_counts.json", "record_lengths"  # a file and a folder in the cache
MAX_COPIES = 16  # the maximum number of copies of the source with the smallest weight, see `mix_sources`
MIXTURE_ERROR = 0.01  # relative errors of weights below this value count as equal


@dataclasses.dataclass(frozen=True)
class RecordSet:
    """TFRecord files with sequences of one length. The records of all files, in order, form one list.

    Attributes:
      paths: the files.
      counts: the number of records of each file.
      layout: `config.data.layout` of the records. Records of Google's code have the default.
      masking: `config.data.masking` of the records. Records of Google's code have the default.
      vocab_size: the vocabulary size of the tokenizer of the records; None if it is unknown.
      on_corrupt: `config.data.on_corrupt`: "stop" or "skip" at a damaged record.
      skipped: {path: numbers of the records that empty records replace}.
      lengths: the lengths of the records in tokens, `[total]`; None if they are unknown.
      sources: the source of each file; "" if a file has records of several sources.
      token_types: the number of token types of the model.
    """

    paths: tuple[str, ...]
    counts: tuple[int, ...]
    layout: str = "google"
    masking: str = "static"
    vocab_size: int | None = None
    on_corrupt: str = "stop"
    skipped: Mapping[str, tuple[range, ...]] = dataclasses.field(default_factory=dict)
    lengths: np.ndarray | None = dataclasses.field(default=None, compare=False)
    sources: tuple[str, ...] = ()
    token_types: int = 2

    @property
    def total(self) -> int:
        """The number of records."""
        return sum(self.counts)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of records of each source."""
        sizes: collections.Counter[str] = collections.Counter()
        for source, count in zip(self.sources, self.counts):
            sizes[source] += count
        return dict(sizes)

    def by_source(self) -> dict[str, "RecordSet"]:
        """Returns {source: the files of the source}."""
        files_of: dict[str, list] = {}
        for path, count, source in zip(self.paths, self.counts, self.sources or [""] * len(self.paths)):
            files_of.setdefault(source, []).append((path, count))
        parts = {source: tuple(zip(*files)) for source, files in files_of.items()}
        return {s: dataclasses.replace(self, paths=p, counts=c, sources=(s,) * len(p)) for s, (p, c) in parts.items()}


def mix_sources(files: RecordSet, weights: Mapping[str, float]) -> RecordSet:
    """Repeats the files of a source in proportion to its weight, and interleaves the sources.

    The numbers of copies are a multiple of the weights, rounded to integers. The multiple is chosen for the smallest
    rounding error. The source with the smallest weight has at most `MAX_COPIES` copies.
    """
    used = {source: weight for source, weight in weights.items() if weight and source in files.sources}
    smallest = min(used.values())
    copies = {source: weight / smallest for source, weight in used.items()}

    def error(factor: int) -> float:
        return max(abs(round(factor * n) / (factor * n) - 1) for n in copies.values())

    factor = min(range(1, MAX_COPIES + 1), key=lambda factor: (max(error(factor), MIXTURE_ERROR), factor))
    files_of = {source: [i for i, name in enumerate(files.sources) if name == source] for source in used}
    repeated = [numbers * round(factor * copies[source]) for source, numbers in files_of.items()]
    places = ((place / len(numbers), number) for numbers in repeated for place, number in enumerate(numbers))
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
    """Writes a TFRecord file.

    Args:
      path: the file.
      blocks: {name of a feature: array `[records, size]`} for successive records, see `layouts.features_of`.

    Returns:
      The entry of the file in the manifest: "records", "bytes", and checksums.

    Raises:
      UserError: if the bytes that are read back differ from the written bytes.
    """
    count, size, checksum, head = 0, 0, 0, b""
    with replacing(path) as partial, partial.open("wb") as file:
        for block in blocks:
            data = tfrecords(block)
            file.write(data)
            count, size = count + count_of(next(iter(block.values()))), size + len(data)
            checksum = google_crc32c.extend(checksum, data)
            head += data[: HEAD_BYTES - len(head)]
    if "://" not in str(path) and crc32c_of(path) != checksum:  # object stores verify uploads
        raise UserError(f"{path}: the checksum differs after writing; check the disk")
    return dict(records=count, bytes=size, crc32c=checksum, head_crc32c=google_crc32c.value(head))


def set_folder(length: int) -> str:
    """Returns the name of the folder with the records of a sequence length."""
    return f"length{length}"


def require_folder(folder: epath.PathLike) -> epath.Path:
    """Returns the folder. Raises `UserError` if it does not exist."""
    folder = epath.Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"config.data.records = {str(folder)!r}: the folder does not exist; create it with bertjax prepare"
        )
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
    """Finds the records of one length and checks them.

    Without a manifest, the files are in the folder or in its subfolder `length<N>`, the names of held-out files contain
    "heldout", and all files are read to count the records.

    Args:
      folder: the folder of the records, `config.data.records`.
      length: the sequence length.
      max_predictions_per_seq: the maximum number of masked positions in a sequence.
      split: "train" or "heldout".
      vocab_size: the vocabulary size of the model, for files without a manifest; None to skip the check.
      token_types: the number of token types of the model.
      on_corrupt: "stop" to raise an error for damaged files, or "skip" to omit them.
      checksums: whether to check whole files, and not only their sizes and their first bytes.
      cache: a folder for counts and lengths, so that unchanged files are not read again.
      measures: whether to measure the lengths of the records if they are unknown.

    Returns:
      The records; None if the split is empty.

    Raises:
      UserError: if files are missing, a damaged file cannot be skipped, or the records have another length or
        vocabulary size.
    """
    folder = require_folder(folder)
    if manifest := read_manifest(folder):
        files = _from_manifest(folder, manifest, length, max_predictions_per_seq, split, on_corrupt, checksums)
    else:
        paths = _find_files(folder, length, split)
        if checksums:
            raise UserError(f"config.data.checksums = True: the records in {folder} have no manifest; set False")
        if not paths:
            return None
        check_record(paths[0], length, max_predictions_per_seq, vocab_size)
        counts = _count_all(paths, None if cache is None else epath.Path(cache) / COUNTS)
        files = RecordSet(tuple(paths), counts, vocab_size=vocab_size, on_corrupt=on_corrupt)
    if files is None:
        return None
    files = dataclasses.replace(files, token_types=token_types)
    if measures and files.lengths is None:
        form = Format(length, max_predictions_per_seq, files.layout, files.masking, files.vocab_size)
        cached = None if cache is None else epath.Path(cache) / LENGTHS
        files = dataclasses.replace(files, lengths=lengths.measure_lengths(files.paths, files.counts, form, cached))
    return files


def _from_manifest(
    folder: epath.Path,
    manifest: Manifest,
    length: int,
    max_predictions_per_seq: int,
    split: str,
    on_corrupt: str,
    checksums: bool,
) -> RecordSet | None:
    """Returns the records of a split in a folder with a manifest; see `find_records`."""
    entry = manifest["sets"].get(str(length))
    if not entry:
        lengths_of_sets = ", ".join(manifest["sets"])
        raise UserError(
            f"config.stages: length = {length}, but the records in {folder} have length {lengths_of_sets}; "
            f"set the length of the stage to a length of the records, or prepare records of length {length} in another "
            f"folder (--workdir of train, --output of prepare)"
        )
    masking = manifest["recipe"].get("masking", "static")
    if masking == "static" and entry["max_predictions_per_seq"] != max_predictions_per_seq:
        raise UserError(
            f"config.stages: max_predictions_per_seq = {max_predictions_per_seq}, but the records of length "
            f"{length} in {folder} were prepared with {entry['max_predictions_per_seq']}; set this value"
        )
    in_split = entry["heldout"] if split == "heldout" else entry["train"]
    if not in_split:
        return None
    files: dict[str, dict[str, Any]] = {
        str(inside(folder, name, folder / MANIFEST)): dict(file) if isinstance(file, dict) else {"records": file}
        for name, file in in_split.items()
    }
    return RecordSet(
        tuple(files),
        tuple(file["records"] for file in files.values()),
        manifest.get("layout", "google"),
        masking,
        manifest["tokenizer"]["vocab_size"],
        on_corrupt,
        skipped={path: (range(files[path]["records"]),) for path in _damaged_files(files, on_corrupt, checksums)},
        lengths=lengths.read_lengths(files) if split == "train" else None,
        sources=tuple(file.get("source", "") for file in files.values()),
    )


def _find_files(folder: epath.Path, length: int, split: str) -> list[str]:
    """Returns the files of `split` in a folder without a manifest; [] if no files are held out."""
    subfolder = folder / set_folder(length)
    paths = [str(p) for p in (subfolder if subfolder.is_dir() else folder).iterdir() if "tfrecord" in p.name.lower()]
    paths = sorted(p for p in paths if ("heldout" in epath.Path(p).name) == (split == "heldout"))
    if not paths and split == "train":
        raise UserError(
            f"config.data.records = {str(folder)!r}: contains no TFRecord files (*.tfrecord*); prepare records"
        )
    for path in paths:
        if (numbered := re.search(r"-of-(\d+)", epath.Path(path).name)) and len(paths) < int(numbered[1]):
            raise UserError(
                f"{subfolder}: contains {len(paths)} of {int(numbered[1])} files; prepare or copy the records again"
            )
    return paths


def _damaged_files(files: Mapping[str, Mapping], on_corrupt: str, checksums: bool) -> list[str]:
    """Returns the files that differ from the manifest. Raises `UserError` if these files cannot be skipped."""
    faults = check_files(files, reads_all=checksums)
    if faults and (on_corrupt == "stop" or len(faults) == len(files)):
        (path, fault), more_files = next(iter(faults.items())), len(faults) - 1
        also = f" (and {more_files} more files are damaged)" if more_files else ""
        raise UserError(f"{path}: {fault}{also}; copy or prepare it again")
    for path, fault in faults.items():
        print(f"{path}: {fault}; skipping its {files[path]['records']:,} records", flush=True)
    return list(faults)


def check_record(path: str, length: int, max_predictions_per_seq: int, vocab_size: int | None = None) -> None:
    """Raises `UserError` if the first record of a file does not match the config."""
    try:
        first = next(read_range(path, 0, None), None)
    except DamagedRecord:
        raise UserError(f"{path}: not a TFRecord file, or damaged; copy or prepare it again") from None
    if first is None:
        raise UserError(f"{path}: contains no records; copy or prepare it again")
    sizes = features(length, max_predictions_per_seq)
    try:
        record = Records([first])
        counts = {name: record.count(name) for name in sizes}
        fits = all(counts[name] == size for name, (size, _) in sizes.items())
        largest = record.numbers("input_ids", length, np.int64).max() if fits else 0
    except InvalidRecord:
        raise UserError(
            f"{path}: the records are not tf.train.Examples with packed lists; prepare them with bertjax prepare"
        ) from None
    for name, (size, _) in sizes.items():
        if counts[name] != size:
            field = "max_predictions_per_seq" if name.startswith("masked") else "length"
            raise UserError(
                f"config.stages: {field} = {size}, but {name} in {path} has {counts[name]} values; "
                f"set {field} to this value, or prepare the records again"
            )
    if vocab_size and largest >= vocab_size:
        raise UserError(
            f"config.model.vocab_size = {vocab_size}: must be above the token id {largest} in {path}; the records have "
            f"another vocabulary"
        )


def count_records(path: str) -> int:
    """Counts the records of a file. Raises `UserError` if the file is damaged."""
    try:
        return sum(1 for _ in read_range(path))
    except DamagedRecord as error:
        raise UserError(f"{path}: damaged ({error}); copy or prepare it again") from None


def _count_all(paths: list[str], counts: epath.PathLike | None) -> tuple[int, ...]:
    """Returns the number of records of each file, from the cache `counts` for files whose size has not changed."""
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


def _read_counts(path: epath.PathLike) -> dict[str, _Counted]:
    """Returns {path of a file of records: counts}; {} if the file `path` is missing or invalid."""
    path = epath.Path(path)
    try:
        return parse_json(read_whole(path), dict[str, _Counted]) if path.exists() else {}
    except ValueError:
        return {}
