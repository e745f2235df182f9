"""What is looked for, and among which documents: what retrieval is judged by, and negatives are mined from.

BEIR's layout (Thakur et al. 2021) is a folder with corpus.jsonl (_id, title, text), queries.jsonl (_id, text), and
qrels/PART.tsv, whose lines (query-id, corpus-id, score) say which documents are relevant to a query.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from etils import epath

from bertjax.common.errors import UserError
from bertjax.data.corpus import fingerprints
from bertjax.data.corpus.tables import Row, column, read_table, read_text, rows_of
from bertjax.finetuning.labels import NumberLabel


class Search(NamedTuple):
    """Queries and documents.

    Attributes:
      relevant: for each query, {the number of a document that is relevant to it: how much, above 0}, one at least.
      identical: for each query, the number of the document with the same id, or -1; () where there are no ids.
      ignores_identical_ids: whether no query finds the document with its id.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    relevant: Sequence[dict[int, float]]
    identical: Sequence[int] = ()
    ignores_identical_ids: bool = False

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Each query with each document that is relevant to it."""
        return [
            (query, self.documents[number]) for query, found in zip(self.queries, self.relevant) for number in found
        ]

    def describe(self, name: str) -> str:
        whole = f"{len(self.queries)} {name} queries for {len(self.documents)} documents"
        if not (count := sum(number >= 0 for number in self.identical)):
            return whole
        whole = f"{whole}; {count} of {len(self.queries)} queries have the id of a document"
        if self.ignores_identical_ids:
            return f"{whole}, which they do not find (ignore_identical_ids)"
        return f"{whole}; if this document is the query itself, leave it out with ignore_identical_ids=True"


def of_texts(texts: Sequence[tuple[str, ...]]) -> Search:
    """Returns the search in examples (query, document, documents that are not relevant ...): each text occurs once."""
    queries: dict[str, dict[int, float]] = {}
    numbers: dict[str, int] = {}
    for query, *documents in texts:
        first, *_ = (numbers.setdefault(document, len(numbers)) for document in documents)
        queries.setdefault(query, {})[first] = 1.0
    return Search(list(queries), list(numbers), list(queries.values()))


def merged(search: Search, more: Iterable[str] = ()) -> Search:
    """Returns a search with more documents, in which each text occurs once."""
    found = of_texts(search.texts)
    documents = list(dict.fromkeys([*found.documents, *search.documents, *more]))
    numbers = {document: number for number, document in enumerate(documents)}
    same = {query: search.documents[i] for query, i in zip(search.queries, search.identical) if i >= 0}
    identical = [numbers[same[query]] if query in same else -1 for query in found.queries] if same else ()
    return found._replace(documents=documents, identical=identical)


def read_documents(path: epath.PathLike) -> list[str]:
    """Reads documents: the lines of a .txt, or those of a table. Raises `UserError` for a missing or invalid file."""
    path = epath.Path(path)
    if path.suffix != ".txt":
        return [document(row) for row in rows_of(path)]
    if not (found := [line.strip() for line in read_text(path).splitlines() if line.strip()]):
        raise UserError(f"{path}: no text in it")
    return found


def read(qrels: epath.Path) -> Search:
    """Reads the queries that a file `qrels/PART.tsv` has relevant documents of, and all documents, in the order of
    their ids. Raises `UserError` for missing or invalid files, and for an id that is not there."""
    folder = qrels.parent.parent
    documents = dict(sorted(_texts(folder / "corpus.jsonl")))
    queries = dict(_texts(folder / "queries.jsonl"))
    numbers, relevant = {name: number for number, name in enumerate(documents)}, {}
    for row in read_table(qrels, quoting=False)[0]:
        query, document = column(row, "query-id"), column(row, "corpus-id")
        score = NumberLabel().value(row, "score")
        if score <= 0:
            continue
        if query not in queries:
            raise UserError(f"{row.where}: no query {query!r} in {folder / 'queries.jsonl'}")
        if document not in numbers:
            corpus = folder / "corpus.jsonl"
            raise UserError(f"{row.where}: {document!r}, which is relevant to query {query!r}, is not in {corpus}")
        relevant.setdefault(query, {})[numbers[document]] = score
    if not relevant:
        raise UserError(f"{qrels}: no score is above 0, so that no query has a relevant document")
    identical = [numbers.get(name, -1) for name in relevant]
    return Search([queries[name] for name in relevant], list(documents.values()), list(relevant.values()), identical)


def _texts(path: epath.Path) -> Iterator[tuple[str, str]]:
    """Yields the ids and the texts of a file. Raises `UserError` if two have the same id."""
    seen = set()
    for row in rows_of(path):
        name = column(row, "_id")
        if name in seen:
            raise UserError(f"{row.where}: a second text with the _id {name!r}")
        seen.add(name)
        yield name, document(row)
    fingerprints.add_file(path)


def document(row: Row) -> str:
    """Returns the `text` of a row, after its `title` if it has one, as BEIR joins them."""
    title = column(row, "title") if row.columns.get("title") is not None else ""
    return f"{title} {column(row, 'text')}".strip()
