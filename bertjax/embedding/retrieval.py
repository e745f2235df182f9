"""Data sets of retrieval: queries, documents and relevance judgements, for evaluation and for hard negatives.

The layout of BEIR (Thakur et al. 2021) is a folder with corpus.jsonl (_id, title, text), queries.jsonl (_id, text), and
qrels/PART.tsv (query-id, corpus-id, score), whose lines are relevance judgements.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from etils import epath

from bertjax.common.errors import UserError
from bertjax.data.corpus import fingerprints
from bertjax.data.corpus.tables import Row, column, lines_with_ends, read_table, rows_of
from bertjax.finetuning.labels import NumberLabel

PARQUET_ROWS = 1024  # rows of a .parquet in memory at a time


class Search(NamedTuple):
    """Queries and documents.

    Attributes:
      queries: the queries.
      documents: the documents.
      relevant: for each query, {number of a relevant document: grade above 0}, at least one.
      identical: for each query, the number of the document with the same id, or -1; () without ids.
      ignores_identical_ids: whether the search for a query ignores the document with the same id.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    relevant: Sequence[dict[int, float]]
    identical: Sequence[int] = ()
    ignores_identical_ids: bool = False

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Each pair of a query and a relevant document."""
        return [
            (query, self.documents[number]) for query, grades in zip(self.queries, self.relevant) for number in grades
        ]

    def describe(self, name: str) -> str:
        """Returns the numbers of queries and documents as text."""
        whole = f"{len(self.queries)} {name} queries for {len(self.documents)} documents"
        if not (count := sum(number >= 0 for number in self.identical)):
            return whole
        whole = f"{whole}; {count} of {len(self.queries)} queries have the id of a document"
        if self.ignores_identical_ids:
            return f"{whole}, which the search ignores (ignore_identical_ids)"
        return f"{whole}; if this document is the query itself, set ignore_identical_ids=True"


def of_texts(texts: Sequence[tuple[str, ...]]) -> Search:
    """Returns the distinct queries and documents of examples (query, relevant document, negatives ...)."""
    queries: dict[str, dict[int, float]] = {}
    numbers: dict[str, int] = {}
    for query, *documents in texts:
        first, *_ = (numbers.setdefault(document, len(numbers)) for document in documents)
        queries.setdefault(query, {})[first] = 1.0
    return Search(list(queries), list(numbers), list(queries.values()))


def without_duplicates(search: Search) -> Search:
    """Returns a search in which each text occurs once."""
    distinct = of_texts(search.texts)
    documents = list(dict.fromkeys([*distinct.documents, *search.documents]))
    numbers = {document: number for number, document in enumerate(documents)}
    same = {query: search.documents[i] for query, i in zip(search.queries, search.identical) if i >= 0}
    identical = [numbers[same[query]] if query in same else -1 for query in distinct.queries] if same else ()
    return distinct._replace(documents=documents, identical=identical)


class CorpusDocument(NamedTuple):
    """A document of a corpus.

    Attributes:
      text: the text, after its title if it has one.
      id: the cell `id` or `_id` of its row in a table; without such a column, and in a .txt, the number of its line.
    """

    text: str
    id: str


def documents_of(path: epath.PathLike) -> Iterator[CorpusDocument]:
    """Yields the documents of a corpus, with a part of the file in memory at a time.

    Args:
      path: a .txt with a document per line, or a table with the column `text` and optionally `title` and `id`.

    Raises:
      UserError: if the file is missing, has no documents, or cannot be read.
    """
    path = epath.Path(path)
    if path.suffix == ".txt":
        yield from _lines_as_documents(path)
        return
    for row in _parquet_rows(path) if path.suffix == ".parquet" else rows_of(path):
        name = next((name for name in ("id", "_id") if name in row.columns), None)
        yield CorpusDocument(document(row), column(row, name) if name else row.where.rpartition(":")[2])


def _lines_as_documents(path: epath.Path) -> Iterator[CorpusDocument]:
    is_empty = True
    if not path.is_file():
        raise UserError(f"{path}: no such file; correct the path")
    for number, line in enumerate(lines_with_ends(path), 1):
        for part in line.splitlines():
            if text := part.strip():
                is_empty = False
                yield CorpusDocument(text, str(number))
    if is_empty:
        raise UserError(f"{path}: has no text; add at least one")


def _parquet_rows(path: epath.Path) -> Iterator[Row]:
    """Yields the rows of a .parquet, with the columns of documents only."""
    import pyarrow
    from pyarrow import parquet

    if not path.is_file():
        raise UserError(f"{path}: no such file; correct the path")
    number = 0
    try:
        with path.open("rb") as raw, parquet.ParquetFile(raw) as file:
            names = file.schema_arrow.names
            if "text" not in names:
                raise UserError(f"{path}: no column 'text'; rename one of the columns {', '.join(names)}")
            used = [name for name in ("text", "title", "id", "_id") if name in names]
            for batch in file.iter_batches(PARQUET_ROWS, columns=used):
                for columns in batch.to_pylist():
                    number += 1
                    yield Row(columns, f"{path}:{number}")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: cannot be read as Parquet after row {number} ({reason})") from None
    if not number:
        raise UserError(f"{path}: has no example; add at least one")


def read_retrieval_set(qrels: epath.Path) -> Search:
    """Reads the queries of a file `qrels/PART.tsv`, and all documents, in the order of the ids of the documents.

    Raises:
      UserError: for missing or invalid files, and for an unknown id.
    """
    folder = qrels.parent.parent
    documents = dict(sorted(read_texts_by_id(folder / "corpus.jsonl")))
    queries = dict(read_texts_by_id(folder / "queries.jsonl"))
    numbers = {name: number for number, name in enumerate(documents)}
    relevant: dict[str, dict[int, float]] = {}
    for query, grades in read_judgements(qrels, queries, documents).items():
        if any(grade > 0 for grade in grades.values()):
            relevant[query] = {numbers[name]: grade for name, grade in grades.items() if grade > 0}
    identical = [numbers.get(name, -1) for name in relevant]
    return Search([queries[name] for name in relevant], list(documents.values()), list(relevant.values()), identical)


def read_judgements(
    qrels: epath.Path, queries: Collection[str], documents: Collection[str]
) -> dict[str, dict[str, float]]:
    """Reads the relevance judgements of a file `qrels/PART.tsv`.

    Args:
      qrels: the file.
      queries: the ids in queries.jsonl.
      documents: the ids in corpus.jsonl.

    Returns:
      {query: {document: grade}}, with the ids of judged documents. Irrelevant documents that are not in `documents` are
      left out.

    Raises:
      UserError: for an invalid file, for an unknown id with a grade above 0, for a document with two grades, and if no
        query has a relevant document.
    """
    folder = qrels.parent.parent
    grades: dict[str, dict[str, float]] = {}
    for row in read_table(qrels, quoting=False)[0]:
        query, document = column(row, "query-id"), column(row, "corpus-id")
        grade = NumberLabel().value(row, "score")
        if query not in queries or document not in documents:
            if grade <= 0:
                continue
            kind, name, file = ("document", document, "corpus") if query in queries else ("query", query, "queries")
            raise UserError(f"{row.where}: the {kind} {name!r} is not in {folder / file}.jsonl; add the {kind}")
        judged = grades.setdefault(query, {})
        if judged.setdefault(document, grade) != grade:
            raise UserError(
                f"{row.where}: the score of {document!r} for {query!r} is {grade:g}, but an earlier line has "
                f"{judged[document]:g}; keep one line"
            )
    if not any(grade > 0 for judged in grades.values() for grade in judged.values()):
        raise UserError(f"{qrels}: no score is above 0, so that no query has a relevant document; add a score above 0")
    return grades


def read_texts_by_id(path: epath.Path) -> Iterator[tuple[str, str]]:
    """Yields the id and the text of each row of a file. Raises `UserError` if two texts have the same id."""
    seen = set()
    for row in rows_of(path):
        name = column(row, "_id")
        if name in seen:
            raise UserError(f"{row.where}: a second text has the _id {name!r}; change one _id")
        seen.add(name)
        yield name, document(row)
    fingerprints.add_file(path)


def document(row: Row) -> str:
    """Returns the `text` of a row, after its `title` if it has one, as BEIR joins them."""
    title = column(row, "title") if row.columns.get("title") is not None else ""
    return f"{title} {column(row, 'text')}".strip()
