"""Reads the documents of `data.corpus`: text files, Hugging Face data sets, TensorFlow Datasets, Python docstrings."""

import builtins
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from bertjax.common.errors import UserError
from bertjax.data.corpus import reading
from bertjax.data.corpus.data_sets import data_set_of, digest
from bertjax.data.corpus.reading import Document, File, ReadOptions

T = TypeVar("T")

PORTION_BYTES = 512_000_000
FILE_BYTES = 1 << 15  # minimum weight of a file in a portion, the cost of opening it; on gs:// the cost is far higher
STAMP_BYTES = 8


class Portion(NamedTuple):
    """A part of one source of the corpus, which one process reads.

    Attributes:
      source: the name of the source in `data.corpus`.
      number: the number of the portion in the corpus, from 0.
      files: the paths of the files; empty for a data set, which is one portion.
      identity: a string that changes if the text may have changed.
      bytes: the size of the files as stored, or the size that a data set states; 0 if unknown.
      stamps: a hash of the size and time of each file, `STAMP_BYTES` per file.
      unread: the files of the source that are not read; only the first portion of the source has them.
    """

    source: str
    number: int
    files: tuple[str, ...]
    identity: str
    bytes: int
    stamps: builtins.bytes
    unread: reading.Kinds

    @property
    def weight(self) -> int:
        """The cost of reading the portion, in bytes."""
        return max(self.bytes, FILE_BYTES * len(self.files))


def corpus_portions(sources: Sequence[str]) -> list[Portion]:
    """Divides the corpus into portions of about `PORTION_BYTES`. Each portion belongs to one source.

    The portions are a function of the sources and of the paths and sizes of their files.

    Raises:
      UserError: a source does not exist.
    """
    corpus: list[Portion] = []
    for source in sources:
        if data_set := data_set_of(source):
            corpus.append(Portion(source, len(corpus), (), data_set.identity, data_set.bytes, b"", {}))
            continue
        listing = reading.list_files(source)
        unread = reading.kinds_of(source, listing.unread)
        for files in in_groups(listing.files, lambda file: max(file.size, FILE_BYTES), PORTION_BYTES):
            paths, stamps = tuple(file.path for file in files), b"".join(map(_stamp, files))
            identity = digest("\n".join(paths).encode(errors="surrogateescape") + stamps)
            size = sum(file.size for file in files)
            corpus.append(Portion(source, len(corpus), paths, identity, size, stamps, unread))
            unread = {}
    return corpus


def in_groups(items: Iterable[T], size_of: Callable[[T], int], enough: int) -> Iterator[list[T]]:
    """Yields groups of consecutive items. The total size of each group, except the last group, is at least `enough`."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= enough:
            yield group
            group, size = [], 0
    if group:
        yield group


def read_portion(portion: Portion, options: ReadOptions = reading.DEFAULT) -> Iterator[Document]:
    """Yields the documents of a portion, in order.

    Raises:
      UserError: text is damaged, cut off or cannot be read, or a file has changed since `corpus_portions` listed it.
    """
    if data_set := data_set_of(portion.source):
        if data_set.identity != portion.identity:
            raise UserError(f"data.corpus: {portion.source!r} changed while the corpus was read; start again")
        yield from data_set.read(options)
    for number, path in enumerate(portion.files):
        stamp = portion.stamps[number * STAMP_BYTES :][:STAMP_BYTES]
        _check_stamp(path, stamp)
        yield from reading.read_corpus_file(path, options)
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
        raise UserError("config.data.corpus = None: must name the text: files, a folder, a glob, hf:NAME, ...")
    collected = list(in_groups(corpus_portions(sources), lambda portion: portion.weight, PORTION_BYTES))
    if len(collected) > 1 and sum(portion.weight for portion in collected[-1]) < PORTION_BYTES:  # too short for blocks
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
            digest("\n".join(part.identity for part in parts).encode()),
            sum(len(part.files) for part in parts),
            sum(part.bytes for part in parts),
        )
        for source, parts in by_source.items()
    }


def unread_kinds(portions: Iterable[Portion]) -> dict[str, reading.Kinds]:
    """Returns the kinds of files of each source that are not read because of their names."""
    return {part.source: part.unread for part in portions if part.unread}


def read_documents(sources: Sequence[str], options: ReadOptions = reading.DEFAULT) -> Iterator[Document]:
    """Yields the documents of all sources, in order. Raises `UserError` if a source is missing, empty or damaged."""
    for source, parts in itertools.groupby(corpus_portions(sources), lambda portion: portion.source):
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
