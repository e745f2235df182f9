"""Reads the documents of `data.corpus`: text files, Hugging Face data sets, TensorFlow Datasets, Python docstrings."""

import builtins
import hashlib
import importlib.metadata
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bertjax.common.errors import UserError
from bertjax.data.corpus import python_docs, reading
from bertjax.data.corpus.reading import Document, File, ReadOptions

PORTION_BYTES = 512_000_000
FILE_BYTES = 1 << 15  # minimum weight of a file in a portion, the cost of opening it; on gs:// the cost is far higher
STAMP_BYTES = 8
HF_ROWS = 256  # rows read at a time


class Portion(NamedTuple):
    """A part of one source of the corpus, which one process reads.

    Attributes:
      source: the name of the source in `data.corpus`.
      number: the number of the portion in the corpus, from 0.
      files: the paths of the files; empty for pydoc, tfds: and hf:, which are one portion each.
      identity: a string that changes if the text may have changed.
      bytes: the size of the files as stored, or the size that a data set states; 0 if unknown.
      stamps: a hash of the size and time of each file, `STAMP_BYTES` per file.
      unread: `reading.Kinds` of the source, in the first portion of the source.
    """

    source: str
    number: int
    files: tuple[str, ...]
    identity: str
    bytes: int
    stamps: builtins.bytes = b""
    unread: tuple[tuple[str, int, tuple[str, ...]], ...] = ()

    @property
    def weight(self) -> int:
        """The cost of reading the portion, in bytes."""
        return max(self.bytes, FILE_BYTES * len(self.files))


def portions(sources: Sequence[str]) -> list[Portion]:
    """Divides the corpus into portions of about `PORTION_BYTES`; a portion is of one source.

    The portions are a function of the sources and of the paths and sizes of their files.

    Raises:
      UserError: a source does not exist.
    """
    corpus: list[Portion] = []
    for source in sources:
        if source == "pydoc":
            corpus.append(Portion(source, len(corpus), (), _python_identity(), 0))
        elif source.startswith("tfds:"):
            corpus.append(Portion(source, len(corpus), (), *_tfds_identity(_load_tfds(source))))
        elif source.startswith("hf:"):
            corpus.append(Portion(source, len(corpus), (), *_hf_identity(source, _load_hf(source))))
        else:
            listing = reading.list_files(source)
            kinds = reading.kinds_of(source, listing.unread).items()
            unread = tuple((kind, count, tuple(names)) for kind, (count, names) in kinds)
            for files in _group(listing.files):
                paths, stamps = tuple(file.path for file in files), b"".join(map(_stamp, files))
                identity = _hash("\n".join(paths).encode(errors="surrogateescape") + stamps)
                size = sum(file.size for file in files)
                corpus.append(Portion(source, len(corpus), paths, identity, size, stamps, unread))
                unread = ()
    return corpus


def _group(files: Iterable[File]) -> Iterator[list[File]]:
    group: list[File] = []
    size = 0
    for file in files:
        group.append(file)
        size += max(file.size, FILE_BYTES)
        if size >= PORTION_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def read_portion(portion: Portion, options: ReadOptions = reading.DEFAULT) -> Iterator[Document]:
    """Yields the documents of a portion, in order.

    Raises:
      UserError: text is damaged, cut off or cannot be read, or a file has changed since `portions` listed it.
    """
    source = portion.source
    if source == "pydoc":
        _check_unchanged(portion, _python_identity())
        yield from python_docs.read_documents()
    elif source.startswith("tfds:"):
        builder = _load_tfds(source)
        _check_unchanged(portion, *_tfds_identity(builder))
        yield from _read_tfds(source, builder, options)
    elif source.startswith("hf:"):
        builder = _load_hf(source)
        _check_unchanged(portion, *_hf_identity(source, builder))
        yield from _read_hf(source, builder, options)
    for number, path in enumerate(portion.files):
        stamp = portion.stamps[number * STAMP_BYTES :][:STAMP_BYTES]
        _check_stamp(path, stamp)
        yield from reading.read_file(path, options)
        _check_stamp(path, stamp)


class Group(NamedTuple):
    """Portions that one process reads as one text and divides into blocks."""

    number: int
    portions: tuple[Portion, ...]

    @property
    def bytes(self) -> int:
        """The size of the portions as stored."""
        return sum(portion.bytes for portion in self.portions)

    @property
    def identity(self) -> str:
        """A string that changes if the text may have changed."""
        return " ".join(portion.identity for portion in self.portions)


def groups(sources: Sequence[str]) -> list[Group]:
    """Returns the corpus as groups of portions of at least `PORTION_BYTES`, or one group for a smaller corpus.

    Raises:
      UserError: there are no sources, or a source does not exist.
    """
    if not sources:
        raise UserError("config.data.corpus = None: say where the text is (files, a folder, a glob, hf:NAME, ...)")
    collected: list[list[Portion]] = [[]]
    size = 0
    for portion in portions(sources):
        if size >= PORTION_BYTES:
            collected.append([])
            size = 0
        collected[-1].append(portion)
        size += portion.weight
    if len(collected) > 1 and size < PORTION_BYTES:  # too short for separate blocks
        collected[-2:] = [collected[-2] + collected[-1]]
    return [Group(number, tuple(portions)) for number, portions in enumerate(collected)]


class Extent(NamedTuple):
    """The identity and the size, as stored, of a source of the corpus."""

    identity: str
    files: int
    bytes: int

    def __str__(self) -> str:
        """Returns the size in words."""
        return f"{self.files:,} files of {self.bytes:,} bytes" if self.files else f"{self.bytes:,} bytes"


def extents(portions: Iterable[Portion]) -> dict[str, Extent]:
    """Returns the extent of each source."""
    by_source: dict[str, list[Portion]] = {}
    for portion in portions:
        by_source.setdefault(portion.source, []).append(portion)
    return {
        source: Extent(
            _hash("\n".join(part.identity for part in parts).encode()),
            sum(len(part.files) for part in parts),
            sum(part.bytes for part in parts),
        )
        for source, parts in by_source.items()
    }


def unread_kinds(portions: Iterable[Portion]) -> dict[str, reading.Kinds]:
    """Returns the kinds of files of each source that are not read because of their names."""
    return {part.source: {kind: (n, [*names]) for kind, n, names in part.unread} for part in portions if part.unread}


def read_documents(sources: Sequence[str], options: ReadOptions = reading.DEFAULT) -> Iterator[Document]:
    """Yields the documents of all sources, in order. Raises `UserError` if a source is missing, empty or damaged."""
    for source, parts in itertools.groupby(portions(sources), lambda portion: portion.source):
        count = 0
        for portion in parts:
            for document in read_portion(portion, options):
                count += 1
                yield document
        check_not_empty({source: count})


def check_not_empty(counts: Mapping[str, int], faults: Mapping[str, str] = {}) -> None:
    """Raises `UserError` if a source has no documents.

    Args:
      counts: the number of documents of each source.
      faults: the fault of one file of a source, for the message.
    """
    for source, count in counts.items():
        if not count:
            raise UserError(f"data.corpus: {source!r} contains no text; {faults.get(source, reading.READABLE)}")


def _stamp(file: File) -> bytes:
    return hashlib.blake2b(f"{file.size} {file.modified}".encode(), digest_size=STAMP_BYTES).digest()


def _check_stamp(path: str, stamp: bytes) -> None:
    if _stamp(reading.file_at(path)) != stamp:
        raise UserError(f"{path}: changed while the corpus was read; start again when no program writes to the file")


def _check_unchanged(portion: Portion, identity: str, *_: int) -> None:
    if identity != portion.identity:
        raise UserError(f"data.corpus: {portion.source!r} changed while the corpus was read; start again")


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _python_identity() -> str:
    packages = sorted(f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions())
    return _hash("\n".join([sys.version, *packages]).encode())


def _load_tfds(source: str) -> Any:
    """Returns the builder of a dataset, which is on disk then."""
    # Comes first: raises `UserError` without TensorFlow, and keeps TensorFlow off accelerators.
    import bertjax.data.tensorflow  # noqa: F401

    import tensorflow_datasets as tfds  # isort: skip

    name = source.removeprefix("tfds:")
    try:
        builder = tfds.builder(name)
        builder.download_and_prepare()
    except Exception as error:  # the library raises many types; each means that the dataset is unavailable
        reason = reading.first_line(error)
        raise UserError(f"data.corpus: TensorFlow Datasets cannot load {name!r} ({reason})") from None
    return builder


def _tfds_identity(builder: Any) -> tuple[str, int]:
    sizes = {name: split.num_bytes for name, split in builder.info.splits.items()}
    return f"{builder.info.full_name} {sizes}", sizes.get("train", 0)


def _read_tfds(source: str, builder: Any, options: ReadOptions) -> Iterator[Document]:
    """Yields the text feature of the train split of a dataset, in file order."""
    from bertjax.data.tensorflow import elements

    name, feature = source.removeprefix("tfds:"), options.text_column
    if feature not in builder.info.features:
        has = ", ".join(builder.info.features)
        raise UserError(f"config.data.text_column = {feature!r}: {name!r} has no such feature; it has {has}")
    dataset = builder.as_dataset(split="train", shuffle_files=False)
    for number, example in enumerate(elements(dataset)):
        if not isinstance(example[feature], bytes):
            raise UserError(f"config.data.text_column = {feature!r}: this feature of {name!r} is not text")
        yield from reading.as_document(f"{source} example {number}", example[feature].decode(), options)


class HubSource(NamedTuple):
    """The parts of hf:NAME[#CONFIGURATION][:SPLIT[:COLUMN]]."""

    name: str  # USER/DATASET, or a folder
    configuration: str | None
    split: str
    column: str  # empty: config.data.text_column


def _hub_source(source: str) -> HubSource:
    name, split, column, *more = [*source.removeprefix("hf:").split(":"), "", ""]
    name, _, configuration = name.partition("#")
    if not name or len(more) > 2:
        raise UserError(f"data.corpus: {source!r}: write hf:NAME[#CONFIGURATION][:SPLIT[:COLUMN]]")
    return HubSource(name, configuration or None, split or "train", column)


def _load_hf(source: str) -> Any:
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


def _hf_identity(source: str, builder: Any) -> tuple[str, int]:
    files = builder.config.data_files or {}
    # `origin_metadata` is the commit of files on the hub, and the modified time of other files.
    parts = [(str(split), list(paths), paths.origin_metadata) for split, paths in sorted(files.items())]
    sizes = builder.info.splits or {}
    split = _hub_source(source).split
    return _hash(repr((builder.config.name, str(builder.info.version), parts)).encode()), (
        sizes[split].num_bytes if split in sizes else 0
    )


def _read_hf(source: str, builder: Any, options: ReadOptions) -> Iterator[Document]:
    """Yields the texts of a column of a split, in the order of the files."""
    hub = _hub_source(source)
    column, setting = (
        (hub.column, "config.data.corpus: COLUMN") if hub.column else (options.text_column, "config.data.text_column")
    )
    number = 0
    try:
        dataset = builder.as_streaming_dataset(split=hub.split)
        for table in dataset.with_format("arrow").iter(HF_ROWS):
            reading.check_column(column, table.schema, repr(source), setting)
            for text in table.column(column).to_pylist():
                number += 1
                yield from reading.as_document(f"{source} example {number}", text or "", options)
    except UserError:
        raise
    except Exception as error:  # the library raises many types
        reason = reading.first_line(error)
        raise UserError(f"data.corpus: {source!r} cannot be read after example {number} ({reason})") from None
