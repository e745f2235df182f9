"""Reads the documents of `data.corpus`: text files, TensorFlow Datasets and Python's own documentation."""

import hashlib
from collections.abc import Iterator, Sequence

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


def is_heldout(document: Document, fraction: float, seed: int) -> bool:
    """Returns whether a document is held out. A hash of its text decides, so all copies land in the same split."""
    digest = hashlib.blake2b("\n".join(document.lines).encode(), digest_size=8, salt=seed.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
