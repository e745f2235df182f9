"""Mines hard negatives from files with the embeddings of a checkpoint."""

import hashlib
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.common.progress import phase
from bertjax.data.corpus.tables import SUFFIXES
from bertjax.embedding import datasets, mining, retrieval, work_folder
from bertjax.embedding.datasets import DOCUMENT, QUERY
from bertjax.embedding.head import similarity_of
from bertjax.embedding.mining import Choice, PairScorer
from bertjax.embedding.stored_texts import StoredTexts
from bertjax.embedding.work_folder import WorkFolder
from bertjax.inference import text_embedding
from bertjax.inference.abilities import require_ability
from bertjax.inference.task import HasEmbeddings
from bertjax.inference.text_embedding import TextEmbedder
from bertjax.interop import pretrained


class MinedFile(NamedTuple):
    """The result of `mine_files`.

    Attributes:
      queries: the number of queries.
      rows: the number of queries with enough negatives. The table has a row for each relevant document of these
        queries.
      lines: lines with the numbers of dropped candidates and queries.
      mean_scores: the mean score of the positives and of the negatives: cosines, or scores of the reranker.
    """

    queries: int
    rows: int
    lines: list[str]
    mean_scores: tuple[float, float]


def make_choice(
    negatives: int, first: int, last: int, margin: str | float, min_score: float, max_score: float, seed: int | None
) -> Choice:
    """Returns the choice of negatives, see `Choice`. Raises `UserError` if the choice excludes all documents.

    Args:
      negatives: the number of negatives of a query.
      first: the rank of the first document that can be a negative; 1 is the nearest document.
      last: the rank of the last document that can be a negative.
      margin: the minimum difference between the cosine of the positive and the cosine of a negative: a number such as
        0.1, or a share of the cosine of the positive such as "5%".
      min_score: the minimum cosine of a negative.
      max_score: the maximum cosine of a negative.
      seed: the seed of a random choice among the documents with these ranks; None takes the nearest documents.
    """
    margin = str(margin)
    for name, count, least in (("negatives", negatives, 1), ("first", first, 1), ("last", last, 1), ("seed", seed, 0)):
        if count is not None and not least <= count < 1 << 31:
            raise UserError(f"--{name}={count}: must be at least {least} and below 2**31")
    if first > last:
        raise UserError(f"--first={first}: must not be above --last={last}")
    if negatives > (ranks := last - first + 1):
        raise UserError(
            f"--negatives={negatives}: must be at most {ranks}, the ranks from {first} to {last}; raise --last"
        )
    if min_score > max_score:
        raise UserError(f"--min_score={min_score}: must not be above --max_score={max_score}")
    is_share = margin.endswith("%")
    try:
        value = float(margin.removesuffix("%")) / (100 if is_share else 1)
    except ValueError:
        raise UserError(f"--margin={margin}: must be a number, such as 0.1, or a share, such as 5%") from None
    for name, number in (("margin", value), ("min_score", min_score), ("max_score", max_score)):
        if math.isnan(number):
            raise UserError(f"--{name}={number}: must be a number")
    return Choice(negatives, first, last, value, is_share, min_score, max_score, seed)


def check_reranker(reranker: str, choice: Choice, with_scores: bool) -> None:
    """Raises `UserError` if the scores of a reranker would not be used."""
    if not choice.has_limits and not with_scores:
        raise UserError(
            f"--reranker={reranker}: no limit compares its scores; add --margin, --max_score or --min_score, or write "
            f"the scores with --scores"
        )


def mine_files(
    checkpoint: str,
    data: str,
    output: str,
    choice: Choice,
    corpus: str | None = None,
    form: str = "pairs",
    texts: str = "anchor,positive",
    dtype: str | None = None,
    reranker: PairScorer | None = None,
    with_scores: bool = False,
) -> MinedFile:
    """Mines hard negatives, and writes a table with the columns anchor, positive, negative_1, ...

    The folder `OUTPUT.work` keeps the embeddings and the finished parts of the comparison, so that the same call
    resumes after an interruption. At the end, the folder is deleted.

    Args:
      checkpoint: the checkpoint.
      data: a file of queries and documents, or a folder with such a train file.
      output: the .jsonl, .csv or .tsv file to write.
      choice: the choice of negatives.
      corpus: a file with more documents.
      form: the form of the examples of `data`, as `config.data.form`.
      texts: the columns of the texts of `data`, as `config.data.texts`.
      dtype: the type to compute in.
      reranker: see `mining.mine_negatives`.
      with_scores: whether to write the columns score_positive, score_negative_1, ... as well.

    Raises:
      UserError: for an invalid file, or a checkpoint without embeddings.
    """
    check_output(output)
    if corpus:
        next(retrieval.documents_of(corpus))  # A wrong path is an error before the checkpoint is read.
    search = retrieval.without_duplicates(datasets.read_training_search(data, form, texts))
    source = pretrained.read_with_tokenizer(checkpoint, dtype)
    task, similarity = require_ability(source, HasEmbeddings), similarity_of(source.settings)
    with work_folder.opened_for(output) as folder:
        if corpus:
            more = (text for text, _ in retrieval.documents_of(corpus))
            search = search._replace(
                documents=StoredTexts.write(folder.path / "documents.arrow", search.documents, more)
            )
        counts = f"{len(search.queries):,} queries and {len(search.documents):,} documents"
        phase(f"computing the embeddings of {counts}", sys.stderr)
        queries, queries_hash = _embeddings(folder, "queries", task.embedder(source, QUERY), search.queries)
        documents, documents_hash = _embeddings(folder, "documents", task.embedder(source, DOCUMENT), search.documents)
        phase("searching for the nearest documents", sys.stderr)
        identity = queries_hash, documents_hash
        mined = mining.mine_negatives(search, queries, documents, choice, similarity, reranker, folder, identity)
        lines = list(mining.write_negatives(output, search, mined, choice, with_scores))
    return MinedFile(len(search.queries), len(mined.rows), lines, mined.cosines)


def check_output(output: str) -> None:
    """Raises `UserError` if an output has no suffix of a table."""
    if not output.endswith(SUFFIXES):
        raise UserError(f"--output={output}: must end in one of {', '.join(SUFFIXES)}")


def _embeddings(folder: WorkFolder, kind: str, embedder: TextEmbedder, texts: Sequence[str]) -> tuple[np.ndarray, str]:
    """Returns the embeddings of texts, mapped into memory, and a hash of the embedder and the texts."""
    digest, size = hashlib.sha256(), 0
    for text in texts:
        size += text_embedding.add_text(digest, text)
    inputs = [embedder.identity(), digest.hexdigest()]
    path = folder.file(kind, inputs, ".npy")
    if not path.exists():
        (rows, _), cut = text_embedding.write_embeddings(path, embedder, texts, size=size)
        if cut:
            longest = embedder.source.max_seq_length
            print(f"{cut:,} of {rows:,} {kind} truncated to {longest} tokens", flush=True)
    return np.load(path, mmap_mode="r"), work_folder.digest_of(inputs)
