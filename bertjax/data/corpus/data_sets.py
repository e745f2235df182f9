"""Sources of a corpus that are not files: Python docstrings, TensorFlow Datasets, Hugging Face data sets."""

import abc
import hashlib
import importlib.metadata
import sys
from collections.abc import Iterator

from bertjax.common.errors import UserError
from bertjax.data.corpus import python_docs, reading
from bertjax.data.corpus.reading import Document, ReadOptions

HF_ROWS = 256  # rows read at a time


class DataSet(abc.ABC):
    """A source of a corpus that one process reads.

    Attributes:
      identity: a string that changes if the text may have changed.
      bytes: the size that the data set states; 0 if unknown.
    """

    identity: str
    bytes: int = 0

    @abc.abstractmethod
    def read(self, options: ReadOptions) -> Iterator[Document]:
        """Yields the documents in order. Raises `UserError` if the data set cannot be read."""


def data_set_of(source: str) -> DataSet | None:
    """Returns the data set of a source of `data.corpus`; None for files.

    Raises:
      UserError: the data set does not exist.
    """
    if source == "pydoc":
        return PythonDocs()
    if source.startswith("tfds:"):
        return TensorFlowDataSet(source)
    return HuggingFaceDataSet(source) if source.startswith("hf:") else None


class PythonDocs(DataSet):
    """The text of `python_docs`, which depends on the installed packages."""

    def __init__(self) -> None:
        """Reads the names and versions of the packages."""
        packages = sorted(f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions())
        self.identity = digest("\n".join([sys.version, *packages]).encode())

    def read(self, options: ReadOptions) -> Iterator[Document]:
        """Yields the documents in order."""
        yield from python_docs.read_python_docs()


class TensorFlowDataSet(DataSet):
    """The text feature of the train split of "tfds:NAME"."""

    def __init__(self, source: str) -> None:
        """Downloads the data set. Raises `UserError` if it cannot be loaded."""
        from bertjax.data import tensorflow

        self._source, self._name = source, source.removeprefix("tfds:")
        builder, self._examples, self.identity = tensorflow.load_dataset(self._name, "train", "data.corpus")
        splits = builder.info.splits
        self._features, self.bytes = builder.info.features, splits["train"].num_bytes if "train" in splits else 0

    def read(self, options: ReadOptions) -> Iterator[Document]:
        """Yields the texts of a feature, in file order."""
        feature = options.text_column
        if feature not in self._features:
            has = ", ".join(self._features)
            raise UserError(
                f"config.data.text_column = {feature!r}: {self._name!r} has no such feature; choose one of {has}"
            )
        for number, example in enumerate(self._examples.as_numpy_iterator()):
            if not isinstance(example[feature], bytes):
                raise UserError(
                    f"config.data.text_column = {feature!r}: the feature of {self._name!r} is not text; choose a "
                    f"feature with text"
                )
            yield from reading.as_document(f"{self._source} example {number}", example[feature].decode(), options)


class HuggingFaceDataSet(DataSet):
    """A column of hf:NAME[#CONFIGURATION][:SPLIT[:COLUMN]], where NAME is USER/DATASET or a folder."""

    def __init__(self, source: str) -> None:
        """Reads the description of the data set. Raises `UserError` if it cannot be loaded."""
        try:
            import datasets
        except ImportError:
            raise UserError(
                f"data.corpus: {source!r} needs Hugging Face's library: pip install 'bertjax[hf]'"
            ) from None
        name, split, self._column, *more = [*source.removeprefix("hf:").split(":"), "", ""]
        name, _, configuration = name.partition("#")
        if not name or len(more) > 2:
            raise UserError(f"data.corpus: {source!r}: write hf:NAME[#CONFIGURATION][:SPLIT[:COLUMN]]")
        self._source, self._split = source, split or "train"
        try:
            self._builder = builder = datasets.load_dataset_builder(name, configuration or None)
        except Exception as error:  # the library raises many types; each means that the data set is unavailable
            raise UserError(f"data.corpus: {source!r} cannot be loaded ({reading.first_line(error)})") from None
        # `origin_metadata` is the commit of files on the hub, and the modified time of other files.
        files = sorted((builder.config.data_files or {}).items())
        parts = [(str(split), list(paths), paths.origin_metadata) for split, paths in files]
        self.identity = digest(repr((builder.config.name, str(builder.info.version), parts)).encode())
        sizes = builder.info.splits or {}
        self.bytes = sizes[self._split].num_bytes if self._split in sizes else 0

    def read(self, options: ReadOptions) -> Iterator[Document]:
        """Yields the texts of the column in the order of the files."""
        column = self._column or options.text_column
        setting = "config.data.corpus: COLUMN" if self._column else "config.data.text_column"
        number = 0
        try:
            dataset = self._builder.as_streaming_dataset(split=self._split)
            for table in dataset.with_format("arrow").iter(HF_ROWS):
                reading.check_column(column, table.schema, repr(self._source), setting)
                for text in table.column(column).to_pylist():
                    number += 1
                    yield from reading.as_document(f"{self._source} example {number}", text or "", options)
        except UserError:
            raise
        except Exception as error:  # the library raises many types
            reason = reading.first_line(error)
            raise UserError(f"data.corpus: {self._source!r} cannot be read after example {number} ({reason})") from None


def digest(content: bytes) -> str:
    """Returns a hash of a content."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
