"""Dense retrieval: an index of documents by their embeddings, kept in a folder that later searches read.

The folder has the documents (`documents.arrow`), their embeddings (`embeddings.npy`), and `index.json`, which
identifies the documents and the checkpoint. `index.json` is written before the embeddings, so that an interrupted
computation of the embeddings resumes without the original file of the documents.
"""

import dataclasses
import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import pyarrow
from etils import epath

from bertjax.common import lock, surrogates
from bertjax.common.errors import UserError
from bertjax.common.files import read_json, replacing, write_whole
from bertjax.embedding.datasets import DOCUMENT, QUERY
from bertjax.embedding.head import similarity_of
from bertjax.embedding.neighbors import nearest
from bertjax.embedding.retrieval import CorpusDocument, documents_of
from bertjax.inference import text_embedding
from bertjax.inference.embedders import embedder_of
from bertjax.inference.text_embedding import TextEmbedder
from bertjax.interop.pretrained import Pretrained

FORMAT = 1  # the version of the layout of the folder
DESCRIPTION, DOCUMENTS, EMBEDDINGS = "index.json", "documents.arrow", "embeddings.npy"
CORPUS_SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
BATCH = 1024  # documents in a record batch of the .arrow
SCHEMA = pyarrow.schema({"text": pyarrow.large_string(), "id": pyarrow.large_string()})
NEW = "name a new folder for a new index"


class HasSource(Protocol):
    """A checkpoint in memory, such as `bertjax.Model`."""

    @property
    def source(self) -> Pretrained:
        """The config, parameters and tokenizer of the checkpoint."""
        ...


class Hit(NamedTuple):
    """A document that a search returns.

    Attributes:
      score: the similarity of the query and the document: a cosine, or a dot product for a checkpoint of
        sentence-transformers that sets dot products.
      id: the id of the document in its table, or the number of its line.
      text: the text of the document, after its title if it has one.
    """

    score: float
    id: str
    text: str


@dataclasses.dataclass(frozen=True)
class IndexDescription:
    """The content of `index.json`.

    Args:
      format: version of the folder's layout.
      documents: number of documents.
      digest: hash of the texts and ids of the documents.
      similarity: cosine or dot.
      vectors: `TextEmbedder.identity()` of the embeddings.
    """

    format: int
    documents: int
    digest: str
    similarity: str
    vectors: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Encoders:
    """The embeddings of queries and of documents by one checkpoint, and the similarity that compares them."""

    queries: TextEmbedder
    documents: TextEmbedder
    similarity: str

    @classmethod
    def from_checkpoint(cls, source: Pretrained, pool: str) -> "Encoders":
        """Returns the encoders of a checkpoint.

        Args:
          source: the checkpoint.
          pool: "" for the embeddings that the checkpoint was trained for; mean, cls or last for pooled hidden states.

        Raises:
          UserError: if `pool` is unknown, or if `pool` is "" and the checkpoint was not trained for embeddings.
        """
        if pool:
            embedder = embedder_of(source, pool=pool)
            return cls(embedder, embedder, "cosine")
        return cls(embedder_of(source, QUERY), embedder_of(source, DOCUMENT), similarity_of(source.settings))


class SearchIndex:
    """Documents with their embeddings, to search by meaning. `build` and `open` return an index.

    Documents and embeddings are read from the disk, so that memory does not grow with the number of documents.
    """

    def __init__(
        self,
        folder: epath.PathLike,
        encoders: Encoders,
        description: IndexDescription,
        temporary: tempfile.TemporaryDirectory | None = None,
    ):
        """Reads a finished index. Call `build` or `open` instead.

        Args:
          folder: the folder of the index.
          encoders: the encoders of the checkpoint that the index belongs to.
          description: the content of `index.json`.
          temporary: a temporary folder, which is deleted with this object; None if the index is kept.

        Raises:
          UserError: if the number of embeddings differs from the number of documents, or if a file is damaged.
        """
        self.folder, self.similarity = folder, description.similarity
        self._encoders, self._temporary = encoders, temporary
        self._documents = _open_documents(folder)
        path, rows = f"{folder}/{EMBEDDINGS}", description.documents
        remedy = "delete the file, and it is computed again"
        try:
            self._embeddings = np.load(path, mmap_mode="r")
        except ValueError as error:
            raise UserError(f"{path}: damaged ({error}); {remedy}") from None
        if len(self._embeddings) != rows:
            raise UserError(f"{path}: has {len(self._embeddings):,} rows, expected {rows:,}; {remedy}")

    @classmethod
    def build(
        cls,
        model: HasSource,
        documents: epath.PathLike | Iterable[str | tuple[str, str]],
        folder: epath.PathLike | None = None,
        pool: str = "",
    ) -> "SearchIndex":
        """Writes an index of documents to a folder, and returns the index.

        If the folder already contains an index of these documents, the method reads this index. An interrupted
        computation of the embeddings is resumed.

        Args:
          model: the checkpoint, such as `bertjax.load("runs/vectors")`.
          documents: one or more texts or tuples (text, id); or the path of a corpus. A corpus is a .txt with a document
            per line, or a .jsonl, .csv, .tsv or .parquet with the column `text` and optionally `title` and `id`.
          folder: the folder to write to; None for a temporary folder, which is deleted with the index.
          pool: "" for the embeddings that the checkpoint was trained for; "mean", "cls" or "last" for pooled hidden
            states, which every checkpoint has.

        Raises:
          UserError: if there are no documents, if the folder contains an index of other documents or of another
            checkpoint, or if `pool` is "" and the checkpoint was not trained for embeddings.
        """
        encoders = Encoders.from_checkpoint(model.source, pool)
        temporary = tempfile.TemporaryDirectory(prefix="bertjax-index-") if folder is None else None
        folder = _local(folder if temporary is None else temporary.name)
        with lock.held(folder, "index"):
            if (folder / DESCRIPTION).exists():
                description = read_description(folder)
                _check_checkpoint(folder, description, encoders)
                _check_documents(folder, description, documents)
            else:
                _require_no_files(folder)
                count, digest = _write_documents(folder / DOCUMENTS, _listed(documents))
                description = IndexDescription(
                    FORMAT, count, digest, encoders.similarity, encoders.documents.identity()
                )
                write_whole(folder / DESCRIPTION, msgspec.json.format(msgspec.json.encode(description)) + b"\n")
            _write_embeddings(folder, encoders.documents)
        return cls(folder, encoders, description, temporary)

    @classmethod
    def open(cls, model: HasSource, folder: epath.PathLike, pool: str = "") -> "SearchIndex":
        """Returns the index in a folder. Completes the embeddings if their computation was interrupted.

        Args:
          model: the checkpoint that the index was built with.
          folder: the folder that `build` has written.
          pool: as in `build`; "" for the pool of the index.

        Raises:
          UserError: if the folder has no index, or an index of another checkpoint.
        """
        folder = _local(folder)
        description = read_description(folder)
        encoders = Encoders.from_checkpoint(model.source, pool or description.vectors.get("pool", ""))
        _check_checkpoint(folder, description, encoders)
        if not (folder / EMBEDDINGS).exists():
            with lock.held(folder, "index"):
                _write_embeddings(folder, encoders.documents)
        return cls(folder, encoders, description)

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self._embeddings)

    def search(self, queries: str | Iterable[str], top_k: int = 5) -> list[list[Hit]]:
        """Returns the documents with the highest similarity to each query, the best one first.

        The search is exact: it compares each query with all documents, in blocks.

        Args:
          queries: one or more queries.
          top_k: number of documents for each query; with fewer documents, all are returned.

        Raises:
          UserError: if a query is not a str, or if `top_k` is less than 1.
        """
        texts = [queries] if isinstance(queries, str) else list(queries)
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise UserError(f"queries[{number}] = {text!r:.60}: must be a str")
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise UserError(f"top_k = {top_k!r}: must be an integer of at least 1")
        if not texts:
            return []
        embeddings, _ = self._encoders.queries([surrogates.replaced(text) for text in texts])
        neighbours = nearest(embeddings, self._embeddings, top_k, self.similarity)
        return [[self._hit(*pair) for pair in zip(*row)] for row in zip(*map(np.ndarray.tolist, neighbours))]

    def _hit(self, number: int, score: float) -> Hit:
        batch = self._documents.get_batch(number // BATCH)
        text, name = (batch.column(column)[number % BATCH].as_py() for column in SCHEMA.names)
        return Hit(score, name, text)


def read_description(folder: epath.PathLike) -> IndexDescription:
    """Reads `index.json`. Raises `UserError` if the file is missing, or if its format has another version."""
    path = epath.Path(folder) / DESCRIPTION
    if not path.exists():
        raise UserError(f"index = {folder}: has no {DESCRIPTION}; name a corpus to write an index, or another folder")
    description = read_json(path, IndexDescription, f"delete {folder}, and build the index again")
    if description.format != FORMAT:
        raise UserError(
            f"{path}: format = {description.format}, expected {FORMAT}; delete {folder}, and build the index again"
        )
    return description


def check_inputs(corpus: str | None, folder: str | None) -> None:
    """Checks a corpus or an index before a checkpoint is read.

    Raises:
      UserError: if the corpus is missing, empty or of an unknown type, or if neither a corpus nor an index is named.
    """
    if corpus is not None:
        next(_listed(corpus))
    elif folder is not None:
        read_description(folder)
    else:
        raise UserError("no documents: name a corpus, or the folder of an index")


def _local(folder: epath.PathLike) -> epath.Path:
    if "://" in str(folder):
        raise UserError(f"index = {folder}: must be a local folder, which is mapped into memory; copy the index first")
    return epath.Path(folder)


def _listed(documents: epath.PathLike | Iterable[str | tuple[str, str]]) -> Iterator[CorpusDocument]:
    """Yields the documents of a file or of an iterable, whose texts are numbered from 1."""
    if isinstance(documents, str | os.PathLike):
        if not str(documents).endswith(CORPUS_SUFFIXES):
            raise UserError(f"corpus = {documents}: must end in one of {', '.join(CORPUS_SUFFIXES)}")
        yield from documents_of(documents)
        return
    number = 0
    for number, document in enumerate(documents, 1):
        parts = (document, str(number)) if isinstance(document, str) else document
        if not (isinstance(parts, tuple) and len(parts) == 2 and all(isinstance(part, str) for part in parts)):
            raise UserError(f"documents[{number - 1}] = {document!r:.60}: must be a text, or a tuple of text and id")
        yield CorpusDocument(*map(surrogates.replaced, parts))
    if not number:
        raise UserError("documents: has no document, expected at least 1")


def _require_no_files(folder: epath.Path) -> None:
    """Raises `UserError` if a folder without an index has files that do not belong to an unfinished index."""
    names = sorted(path.name for path in folder.iterdir())
    if other_files := [name for name in names if name != lock.FILE and not name.startswith(DOCUMENTS)]:
        raise UserError(f"index = {folder}: has no {DESCRIPTION}, but other files such as {other_files[0]}; {NEW}")


def _check_checkpoint(folder: epath.Path, description: IndexDescription, encoders: Encoders) -> None:
    """Raises `UserError` unless the embeddings of an index equal the embeddings by the encoders."""
    stored = {**description.vectors, "similarity": description.similarity}
    actual = {**encoders.documents.identity(), "similarity": encoders.similarity}
    # `pool` comes first, because with `pool` the hash of the checkpoint does not include the head.
    name = next((x for x in ("pool", *stored) if stored.get(x) != actual.get(x)), "")
    if name == "checkpoint":
        path = encoders.documents.source.path
        raise UserError(
            f"index = {folder}: was built with another checkpoint than {path}; name the checkpoint of the index, "
            f"or {NEW}"
        )
    if name:
        before, now = stored.get(name, ""), actual.get(name, "")
        raise UserError(f"index = {folder}: was built with {name} = {before!r}, not {now!r}; use {before!r}, or {NEW}")


def _check_documents(
    folder: epath.Path, description: IndexDescription, documents: epath.PathLike | Iterable[str | tuple[str, str]]
) -> None:
    """Raises `UserError` unless an index has these documents."""
    digest, count = hashlib.sha256(), 0
    for document in _listed(documents):
        for part in document:
            text_embedding.add_text(digest, part)
        count += 1
    if digest.hexdigest() != description.digest:
        shown = documents if isinstance(documents, str | os.PathLike) else "the documents"
        raise UserError(
            f"index = {folder}: has {description.documents:,} other documents than {shown} with {count:,}; leave out "
            f"the corpus to search this index, or {NEW}"
        )


def _write_documents(path: epath.Path, documents: Iterator[CorpusDocument]) -> tuple[int, str]:
    """Writes documents as record batches; returns their number and their digest."""
    digest, count = hashlib.sha256(), 0
    with replacing(path) as partial, pyarrow.OSFile(str(partial), "wb") as file:
        with pyarrow.ipc.new_file(file, SCHEMA) as writer:
            while rows := list(itertools.islice(documents, BATCH)):
                for part in itertools.chain.from_iterable(rows):
                    text_embedding.add_text(digest, part)
                count += len(rows)
                writer.write_batch(pyarrow.RecordBatch.from_pydict(dict(zip(SCHEMA.names, zip(*rows))), SCHEMA))
    return count, digest.hexdigest()


def _open_documents(folder: epath.PathLike) -> pyarrow.ipc.RecordBatchFileReader:
    path = os.path.join(folder, DOCUMENTS)
    try:
        return pyarrow.ipc.open_file(pyarrow.memory_map(path))
    except (FileNotFoundError, pyarrow.ArrowInvalid) as error:
        raise UserError(f"{path}: damaged ({error}); delete {folder}, and build the index again") from None


def _write_embeddings(folder: epath.Path, encoder: TextEmbedder) -> None:
    """Computes the embeddings of the documents, and keeps the rows that an interrupted computation has written."""
    if (folder / EMBEDDINGS).exists():
        return
    reader = _open_documents(folder)
    batches = map(reader.get_batch, range(reader.num_record_batches))
    texts = itertools.chain.from_iterable(batch.column("text").to_pylist() for batch in batches)
    size = (folder / DOCUMENTS).stat().length
    (rows, _), truncated = text_embedding.write_embeddings(folder / EMBEDDINGS, encoder, texts, size=size)
    if truncated:
        print(f"{truncated:,} of {rows:,} documents truncated to the longest input of the checkpoint", file=sys.stderr)
