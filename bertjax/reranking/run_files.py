"""Reranks the candidates of a run file of TREC, and writes the new ranking as a run file."""

from collections.abc import Mapping
from typing import NamedTuple

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.common.progress import Bar
from bertjax.embedding.index import SearchIndex
from bertjax.embedding.retrieval import read_texts_by_id
from bertjax.interop.pretrained import Pretrained
from bertjax.reranking import trec
from bertjax.reranking.ranking import Ranker

DOCUMENTS_AT_ONCE = 4096  # pairs that are scored together


def read_queries(path: epath.PathLike) -> dict[str, str]:
    """Returns the id and the text of each query in a table with the columns `_id` and `text`.

    Raises:
      UserError: for a missing or invalid file, and for an id that a run file cannot contain.
    """
    queries = dict(read_texts_by_id(epath.Path(path)))
    trec.require_ids(queries, f"{path}: ")
    return queries


def write_run(
    index: SearchIndex,
    queries: Mapping[str, str],
    output: epath.PathLike,
    top_k: int,
    ignore_identical_ids: bool = False,
) -> str:
    """Searches the documents of many queries, and writes a run file.

    Args:
      index: the index of the documents.
      queries: the text of each query, by its id.
      output: the run file to write.
      top_k: the number of documents of each query.
      ignore_identical_ids: whether to leave out the document that has the id of the query.

    Returns:
      A line about the file.
    """
    rankings = {}
    for query, hits in zip(queries, index.search(list(queries.values()), top_k + ignore_identical_ids)):
        kept = [(hit.id, hit.score) for hit in hits if not (ignore_identical_ids and hit.id == query)]
        rankings[query] = kept[:top_k]
    write_whole(epath.Path(output), "".join(trec.run_lines(rankings)))
    return f"{sum(map(len, rankings.values())):,} documents of {len(queries):,} queries in {output}"


class RerankedFile(NamedTuple):
    """The result of `rerank_run`.

    Attributes:
      queries: the number of queries.
      documents: the number of scored documents, of all queries.
    """

    queries: int
    documents: int


class Candidates(NamedTuple):
    """The candidates of queries.

    Attributes:
      run: the ids of the candidates of each query.
      queries: the text of each query.
      documents: the text of each candidate.
    """

    run: dict[str, list[str]]
    queries: dict[str, str]
    documents: dict[str, str]


def read_candidates(folder: epath.PathLike, path: epath.PathLike, top_k: int) -> Candidates:
    """Reads the first candidates of each query, and their texts.

    Args:
      folder: a folder in the format of BEIR, with queries.jsonl and corpus.jsonl.
      path: a run file of TREC with the candidates of each query.
      top_k: the number of first candidates of a query; the others are left out.

    Raises:
      UserError: for a missing or invalid file, or an unknown id.
    """
    folder = epath.Path(folder)
    if not folder.is_dir():
        raise UserError(f"--data={folder}: no such folder; name a folder with corpus.jsonl and queries.jsonl")
    run = {query: names[:top_k] for query, names in trec.read_run(path).items()}
    used = {name for names in run.values() for name in names}
    queries = dict(read_texts_by_id(folder / "queries.jsonl"))
    documents = {name: text for name, text in read_texts_by_id(folder / "corpus.jsonl") if name in used}
    trec.check_ids(queries, run, path, folder / "queries.jsonl", "query")
    trec.check_ids(documents, used, path, folder / "corpus.jsonl", "document")
    return Candidates(run, queries, documents)


def rerank_run(source: Pretrained, candidates: Candidates, output: epath.PathLike) -> RerankedFile:
    """Scores candidates, and writes them in the new order to a run file.

    Raises:
      UserError: if the checkpoint is no reranker.
    """
    ranker, (run, queries, documents) = Ranker(source), candidates
    pairs = [(query, name) for query, names in run.items() for name in names]
    scores: list[float] = []
    with Bar("reranking", [len(pairs)], " documents") as bar:
        for start in range(0, len(pairs), DOCUMENTS_AT_ONCE):
            part = pairs[start : start + DOCUMENTS_AT_ONCE]
            scores += ranker.scores([(queries[query], documents[name]) for query, name in part]).tolist()
            bar.update(len(part))
    rankings: dict[str, list[tuple[str, float]]] = {query: [] for query in run}
    for (query, name), score in zip(pairs, scores):
        rankings[query].append((name, score))
    for ranking in rankings.values():
        ranking.sort(key=lambda pair: -pair[1])
    write_whole(epath.Path(output), "".join(trec.run_lines(rankings)))
    return RerankedFile(len(run), len(pairs))
