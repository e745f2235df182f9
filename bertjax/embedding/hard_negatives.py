"""Mines hard negatives from files with the embeddings of a checkpoint."""

import math
import sys
from typing import NamedTuple

from bertjax.common.errors import UserError
from bertjax.common.progress import phase
from bertjax.data.corpus.tables import SUFFIXES
from bertjax.embedding import datasets, mining, retrieval
from bertjax.embedding.head import similarity_of
from bertjax.embedding.mining import Choice
from bertjax.inference.abilities import require_ability
from bertjax.inference.task import HasEmbeddings
from bertjax.interop import pretrained


class MinedFile(NamedTuple):
    """The result of `mine_files`.

    Attributes:
      queries: the number of queries.
      rows: the number of queries with enough negatives. The table has a row for each relevant document of these
        queries.
      lines: lines with the numbers of dropped candidates and queries.
    """

    queries: int
    rows: int
    lines: list[str]


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


def mine_files(
    checkpoint: str,
    data: str,
    output: str,
    choice: Choice,
    corpus: str | None = None,
    form: str = "pairs",
    texts: str = "anchor,positive",
    dtype: str | None = None,
) -> MinedFile:
    """Mines hard negatives, and writes a table with the columns anchor, positive, negative_1, ...

    Args:
      checkpoint: the checkpoint.
      data: a file of queries and documents, or a folder with such a train file.
      output: the .jsonl, .csv or .tsv file to write.
      choice: the choice of negatives.
      corpus: a file with more documents.
      form: the form of the examples of `data`, as `config.data.form`.
      texts: the columns of the texts of `data`, as `config.data.texts`.
      dtype: the type to compute in.

    Raises:
      UserError: for an invalid file, or a checkpoint without embeddings.
    """
    if not output.endswith(SUFFIXES):
        raise UserError(f"--output={output}: must end in one of {', '.join(SUFFIXES)}")
    more = retrieval.read_corpus_texts(corpus) if corpus else ()
    search = retrieval.with_documents(datasets.read_training_search(data, form, texts), more)
    source = pretrained.read_with_tokenizer(checkpoint, dtype)
    task, similarity = require_ability(source, HasEmbeddings), similarity_of(source.settings)
    counts = f"{len(search.queries):,} queries and {len(search.documents):,} documents"
    phase(f"computing the embeddings of {counts}", sys.stderr)
    queries, documents = task.embed_search(source, search)
    phase("searching for the nearest documents", sys.stderr)
    mined = mining.mine_negatives(search, queries, documents, choice, similarity)
    lines = list(mining.write_negatives(output, search, mined, choice, similarity))
    return MinedFile(len(search.queries), len(mined.rows), lines)
