"""Reads the documents of `data.corpus`: text files, Hugging Face data sets, TensorFlow Datasets, Python's own texts."""

import hashlib
import importlib.metadata
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bertjax.common.errors import UserError
from bertjax.data.corpus import python_docs, reading
from bertjax.data.corpus.reading import Document, File, Reading

PORTION_BYTES = 512_000_000
FILE_BYTES = 1 << 15  # a smaller file counts as so many in a portion: opening one costs as much, on gs:// far more
STAMP_BYTES = 8
HF_ROWS = 256  # rows read at a time


class Portion(NamedTuple):
    """A part of one source of the corpus, which is read from start to end."""

    source: str  # the source's name in data.corpus
    number: int  # over all sources, from 0
    files: tuple[str, ...]  # paths; empty for pydoc, tfds: and hf:, which are one portion each
    identity: str  # changes if the text may have changed
    bytes: int  # bytes of the files as stored, or those that a data set states; 0 if unknown
    stamps: bytes = b""  # `STAMP_BYTES` a file: a hash of its size and modified time
    others: tuple[tuple[str, int, tuple[str, ...]], ...] = ()  # `reading.Kinds` of a source, with its first portion

    @property
    def weight(self) -> int:
        """How many bytes reading it is like."""
        return max(self.bytes, FILE_BYTES * len(self.files))


def portions(sources: Sequence[str]) -> list[Portion]:
    """Returns the corpus in parts of about `PORTION_BYTES`, none of two sources. Raises `UserError` if one is missing.

    The parts are a function of the sources and of the paths and sizes of their files.
    """
    found = []
    for source in sources:
        if source == "pydoc":
            found.append(Portion(source, len(found), (), _python_identity(), 0))
        elif source.startswith("tfds:"):
            found.append(Portion(source, len(found), (), *_tfds_identity(_load_tfds(source))))
        elif source.startswith("hf:"):
            found.append(Portion(source, len(found), (), *_hf_identity(source, _load_hf(source))))
        else:
            listing = reading.list_files(source)
            kinds = reading.kinds_of(source, listing.others).items()
            others = tuple((kind, count, tuple(names)) for kind, (count, names) in kinds)
            for files in _group(listing.files):
                paths, stamps = tuple(file.path for file in files), b"".join(map(_stamp, files))
                identity = _hash("\n".join(paths).encode(errors="surrogateescape") + stamps)
                size = sum(file.size for file in files)
                found.append(Portion(source, len(found), paths, identity, size, stamps, others))
                others = ()
    return found


def _group(files: Iterable[File]) -> Iterator[list[File]]:
    group, size = [], 0
    for file in files:
        group.append(file)
        size += max(file.size, FILE_BYTES)
        if size >= PORTION_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def read_portion(portion: Portion, how: Reading = reading.DEFAULT) -> Iterator[Document]:
    """Yields the documents of a portion, in order.

    Raises `UserError` if text cannot be read, is damaged or cut off, or is no longer what `portions` saw.
    """
    source = portion.source
    if source == "pydoc":
        _check_unchanged(portion, _python_identity())
        yield from python_docs.read_documents()
    elif source.startswith("tfds:"):
        builder = _load_tfds(source)
        _check_unchanged(portion, *_tfds_identity(builder))
        yield from _read_tfds(source, builder, how)
    elif source.startswith("hf:"):
        builder = _load_hf(source)
        _check_unchanged(portion, *_hf_identity(source, builder))
        yield from _read_hf(source, builder, how)
    for number, path in enumerate(portion.files):
        stamp = portion.stamps[number * STAMP_BYTES :][:STAMP_BYTES]
        _check_stamp(path, stamp)
        yield from reading.read_file(path, how)
        _check_stamp(path, stamp)


class Group(NamedTuple):
    """Portions that one process reads, and divides into blocks, as one text."""

    number: int
    portions: tuple[Portion, ...]

    @property
    def bytes(self) -> int:
        return sum(portion.bytes for portion in self.portions)

    @property
    def identity(self) -> str:
        return " ".join(portion.identity for portion in self.portions)


def groups(sources: Sequence[str]) -> list[Group]:
    """Returns the corpus as groups of portions: of at least `PORTION_BYTES`, unless the corpus is smaller.

    Raises `UserError` if there are no sources, or if one is missing.
    """
    if not sources:
        raise UserError("config.data.corpus = None: say where the text is (files, a folder, a glob, hf:NAME, ...)")
    collected, size = [[]], 0
    for portion in portions(sources):
        if size >= PORTION_BYTES:
            collected.append([])
            size = 0
        collected[-1].append(portion)
        size += portion.weight
    if len(collected) > 1 and size < PORTION_BYTES:  # too short for blocks of its own
        collected[-2:] = [collected[-2] + collected[-1]]
    return [Group(number, tuple(portions)) for number, portions in enumerate(collected)]


class Extent(NamedTuple):
    """A source of the corpus as it was read: what identifies its text, and its size as stored."""

    identity: str
    files: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.files:,} files of {self.bytes:,} bytes" if self.files else f"{self.bytes:,} bytes"


def extents(found: Iterable[Portion]) -> dict[str, Extent]:
    """Returns the extent of each source."""
    by_source: dict[str, list[Portion]] = {}
    for portion in found:
        by_source.setdefault(portion.source, []).append(portion)
    return {
        source: Extent(
            _hash("\n".join(part.identity for part in parts).encode()),
            sum(len(part.files) for part in parts),
            sum(part.bytes for part in parts),
        )
        for source, parts in by_source.items()
    }


def others_of(found: Iterable[Portion]) -> dict[str, reading.Kinds]:
    """Returns the files of each source that are not read because of their names."""
    return {part.source: {kind: (n, [*names]) for kind, n, names in part.others} for part in found if part.others}


def read_documents(sources: Sequence[str], how: Reading = reading.DEFAULT) -> Iterator[Document]:
    """Yields the documents of all sources, in order. Raises `UserError` if one is missing, empty or damaged."""
    for source, parts in itertools.groupby(portions(sources), lambda portion: portion.source):
        count = 0
        for portion in parts:
            for document in read_portion(portion, how):
                count += 1
                yield document
        check_not_empty({source: count})


def check_not_empty(counts: Mapping[str, int], faults: Mapping[str, str] = {}) -> None:
    """Raises `UserError` if one of the sources has no documents.

    `counts` are the documents of all its portions; `faults` is the fault of one of its files.
    """
    for source, count in counts.items():
        if not count:
            raise UserError(f"data.corpus: {source!r} contains no text; {faults.get(source, reading.READABLE)}")


def _stamp(file: File) -> bytes:
    return hashlib.blake2b(f"{file.size} {file.modified}".encode(), digest_size=STAMP_BYTES).digest()


def _check_stamp(path: str, stamp: bytes) -> None:
    if _stamp(reading.file_at(path)) != stamp:
        raise UserError(f"{path}: changed while the corpus was read; start again when nothing writes to it")


def _check_unchanged(portion: Portion, identity: str, *_) -> None:
    if identity != portion.identity:
        raise UserError(f"data.corpus: {portion.source!r} changed while the corpus was read; start again")


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _python_identity() -> str:
    packages = sorted(f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions())
    return _hash("\n".join([sys.version, *packages]).encode())


def _load_tfds(source: str):
    """Returns the builder of a dataset that is on disk."""
    import bertjax.data.tensorflow  # noqa: F401  first: says if TensorFlow is not installed, keeps it off accelerators

    import tensorflow_datasets as tfds  # isort: skip

    name = source.removeprefix("tfds:")
    try:
        builder = tfds.builder(name)
        builder.download_and_prepare()
    except Exception as error:  # the library raises many types; each means that the dataset is unavailable
        reason = reading.first_line(error)
        raise UserError(f"data.corpus: TensorFlow Datasets cannot load {name!r} ({reason})") from None
    return builder


def _tfds_identity(builder) -> tuple[str, int]:
    sizes = {name: split.num_bytes for name, split in builder.info.splits.items()}
    return f"{builder.info.full_name} {sizes}", sizes.get("train", 0)


def _read_tfds(source: str, builder, how: Reading) -> Iterator[Document]:
    """Yields a feature of a dataset's train split, in file order."""
    from bertjax.data.tensorflow import elements

    name, feature = source.removeprefix("tfds:"), how.text_column
    if feature not in builder.info.features:
        has = ", ".join(builder.info.features)
        raise UserError(f"config.data.text_column = {feature!r}: {name!r} has no such feature; it has {has}")
    dataset = builder.as_dataset(split="train", shuffle_files=False)
    for number, example in enumerate(elements(dataset)):
        if not isinstance(example[feature], bytes):
            raise UserError(f"config.data.text_column = {feature!r}: in {name!r} that is no text")
        yield from reading.as_document(f"{source} example {number}", example[feature].decode(), how)


class HubSource(NamedTuple):
    """hf:NAME[#CONFIGURATION][:SPLIT[:COLUMN]]."""

    name: str  # user/set, or a folder
    configuration: str | None
    split: str
    column: str  # empty: config.data.text_column


def _hub_source(source: str) -> HubSource:
    name, split, column, *more = [*source.removeprefix("hf:").split(":"), "", ""]
    name, _, configuration = name.partition("#")
    if not name or len(more) > 2:
        raise UserError(f"data.corpus: {source!r}: write hf:NAME[#CONFIGURATION][:SPLIT[:COLUMN]]")
    return HubSource(name, configuration or None, split or "train", column)


def _load_hf(source: str):
    """Returns the builder of a data set."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.corpus: {source!r} needs Hugging Face's library: pip install 'bertjax[hf]'") from None
    hub = _hub_source(source)
    try:
        return datasets.load_dataset_builder(hub.name, hub.configuration)
    except Exception as error:  # the library raises many types; each means that the data set is unavailable
        raise UserError(f"data.corpus: {source!r} cannot be loaded ({reading.first_line(error)})") from None


def _hf_identity(source: str, builder) -> tuple[str, int]:
    files = builder.config.data_files or {}
    # The origin of files on the hub is the commit, that of other files their modified time.
    parts = [(str(split), list(paths), paths.origin_metadata) for split, paths in sorted(files.items())]
    sizes = builder.info.splits or {}
    split = _hub_source(source).split
    return _hash(repr((builder.config.name, str(builder.info.version), parts)).encode()), (
        sizes[split].num_bytes if split in sizes else 0
    )


def _read_hf(source: str, builder, how: Reading) -> Iterator[Document]:
    """Streams a column of a split, in the order of its files."""
    hub = _hub_source(source)
    column, setting = (
        (hub.column, "config.data.corpus: COLUMN") if hub.column else (how.text_column, "config.data.text_column")
    )
    number = 0
    try:
        dataset = builder.as_streaming_dataset(split=hub.split)
        for table in dataset.with_format("arrow").iter(HF_ROWS):
            reading.check_column(column, table.schema, repr(source), setting)
            for text in table.column(column).to_pylist():
                number += 1
                yield from reading.as_document(f"{source} example {number}", text or "", how)
    except UserError:
        raise
    except Exception as error:  # the library raises many types
        reason = reading.first_line(error)
        raise UserError(f"data.corpus: {source!r} cannot be read after example {number} ({reason})") from None
