"""Reads the documents of `data.corpus`: text files, TensorFlow Datasets and Python's own documentation."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bertjax.config import UserError
from bertjax.text import documents, python_docs
from bertjax.text.documents import Document


def read_documents(sources: Sequence[str], text_column: str = "text") -> Iterator[Document]:
    """Yields the documents of all sources, in order. Raises `UserError` if one is missing, empty or damaged."""
    for source in sources:
        if source == "pydoc":
            yield from python_docs.read_documents()
        elif source.startswith("tfds:"):
            yield from _read_tfds(source.removeprefix("tfds:"), text_column)
        else:
            yield from documents.read_documents(source, text_column)


def _read_tfds(name: str, feature: str) -> Iterator[Document]:
    """Yields a feature of a dataset's train split, in file order."""
    import tensorflow_datasets as tfds

    import bertjax.data.tf  # noqa: F401  keeps TensorFlow off accelerators

    try:
        builder = tfds.builder(name)
        builder.download_and_prepare()
    except Exception as error:  # the library raises many types; each means that the dataset is unavailable
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"data.corpus: TensorFlow Datasets cannot load {name!r} ({reason})") from None
    if feature not in builder.info.features:
        has = ", ".join(builder.info.features)
        raise UserError(f"config.data.text_column = {feature!r}: {name!r} has no such feature; it has {has}")
    dataset = builder.as_dataset(split="train", shuffle_files=False)
    for number, example in enumerate(dataset.as_numpy_iterator()):
        if not isinstance(example[feature], bytes):
            raise UserError(f"config.data.text_column = {feature!r}: in {name!r} that is no text")
        if lines := documents.text_lines(example[feature].decode()):
            yield Document(f"tfds:{name} example {number}", lines)


class Portion(NamedTuple):  # STUB
    source: str
    number: int
    files: tuple[str, ...]
    identity: str
    bytes: int


PORTION_BYTES = 512 << 20


def portions(sources):  # STUB
    import os

    found = []
    for number, source in enumerate(sources):
        files = [] if source == "pydoc" or source.startswith("tfds:") else documents.find_files(source)
        size = sum(f.stat().length for f in files)
        identity = str([(str(f), f.stat().length, os.stat(f).st_mtime_ns if "://" not in str(f) else 0) for f in files])
        found.append(Portion(source, number, tuple(map(str, files)), identity, size))
    return found


def read_portion(portion, text_column="text"):  # STUB
    yield from read_documents([portion.source], text_column)


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
    """Divides the corpus into groups of consecutive portions: of `PORTION_BYTES`, the last one of more."""
    collected, size = [[]], 0
    for portion in portions(sources):
        if size >= PORTION_BYTES:
            collected.append([])
            size = 0
        collected[-1].append(portion)
        size += portion.bytes
    if len(collected) > 1 and size < PORTION_BYTES:  # too short for blocks of its own
        collected[-2:] = [collected[-2] + collected[-1]]
    return [Group(number, tuple(portions)) for number, portions in enumerate(collected)]


def read_group(group: Group, text_column: str) -> Iterator[tuple[str, Document]]:
    """Yields the documents of a group, each with the source that it is from."""
    for portion in group.portions:
        for document in read_portion(portion, text_column):
            yield portion.source, document
