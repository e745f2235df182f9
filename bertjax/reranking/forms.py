"""The forms of lists that rerankers are trained on and evaluated on, and the files that contain them."""

import abc
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.lists import split_at_commas
from bertjax.data.corpus.tables import Row, cell, column
from bertjax.embedding.forms import MOST, FileForm, rows_with_columns, texts_of
from bertjax.embedding.retrieval import document as document_of
from bertjax.embedding.retrieval import read_judgements, read_texts_by_id
from bertjax.finetuning import squad_files
from bertjax.finetuning.labels import NumberLabel
from bertjax.finetuning.tasks.squad import VERSIONS
from bertjax.reranking import trec

NOTHING: Mapping[str, Any] = types.MappingProxyType({})
NO_RELEVANT = "queries without a relevant document"  # a reason in `ListSet.skipped`


class RankingList(NamedTuple):
    """A query with documents.

    Attributes:
      query: the query.
      documents: the documents, without repetitions. In a list with candidates, they are in the order of the candidates.
      grades: the relevance grade, the label or the teacher's score of each document.
      missing: the relevant documents that are not among `documents`, with their grades above 0.
      appended: the number of relevant documents at the end of `documents` that the first stage did not find.
    """

    query: str
    documents: tuple[str, ...]
    grades: tuple[float, ...]
    missing: tuple[tuple[str, float], ...] = ()
    appended: int = 0


class ListSet(NamedTuple):
    """The lists of a set.

    Attributes:
      lists: the lists.
      is_ranked: whether the order of the documents is the ranking of a first stage, which a reranker should improve.
      skipped: the number of queries without a list, by reason.
    """

    lists: Sequence[RankingList]
    is_ranked: bool = False
    skipped: Mapping[str, int] = NOTHING


class ListForm(FileForm, abc.ABC):
    """The form of the lists of a set.

    Attributes:
      needs_label: whether the column `label` has the grades.
    """

    needs_label: ClassVar[bool] = False

    @abc.abstractmethod
    def read(self, path: epath.Path, columns: Sequence[str], label: str, candidates: str) -> ListSet:
        """Reads a set.

        Args:
          path: the file.
          columns: the columns of the texts.
          label: the column, or the columns separated by commas, of the labels; "" for none.
          candidates: a run file of TREC with the candidates of each query; "" for none.

        Raises:
          UserError: for an invalid row: file and line.
        """


class QueriesWithNegatives(ListForm):
    """A query, its positive, and any number of negatives; with labels, the scores of a teacher.

    The labels are a column for each document, or for each negative: then the difference between the scores of the
    positive and of the negative (MarginMSE).
    """

    columns = range(2, MOST)
    needs = "must name two columns or more: query, positive, negatives"

    def read(self, path: epath.Path, columns: Sequence[str], label: str, candidates: str) -> ListSet:
        """Reads the rows of a table. A negative may be empty."""
        labels, documents, lists = label_columns(label), len(columns) - 1, []
        for row in rows_with_columns(path, columns, *labels):
            texts = texts_of(row, columns[:2]) + tuple(column(row, name).strip() for name in columns[2:])
            grades = [_number(row, name) for name in labels] or [1.0] + [0.0] * (documents - 1)
            if len(grades) < documents:
                grades = [0.0, *(-margin for margin in grades)]
            kept = [i for i in range(documents) if texts[1 + i]]
            lists.append(
                _make_list(
                    row.where, texts[0], [texts[1 + i] for i in kept], [grades[i] for i in kept], first_wins=True
                )
            )
        return ListSet(lists)


class LabelledDocuments(ListForm):
    """A query, a document and the label or score of the document. Rows with the same query are a list."""

    columns = range(2, 3)
    needs = "must name two columns: query, document"
    needs_label = True

    def read(self, path: epath.Path, columns: Sequence[str], label: str, candidates: str) -> ListSet:
        """Reads the rows of a table."""
        documents: dict[str, dict[str, float]] = {}
        for row in rows_with_columns(path, columns, label):
            query, document = texts_of(row, columns)
            grade, graded = _number(row, label), documents.setdefault(query, {})
            if graded.setdefault(document, grade) != grade:
                raise UserError(
                    f"{row.where}: {label} is {grade:g}, but an earlier row of this query and document has "
                    f"{graded[document]:g}; keep one row"
                )
        return ListSet([_ranking(query, graded) for query, graded in documents.items()])


class DocumentLists(ListForm):
    """A query with a list of documents and a list of their grades, in JSON lines."""

    columns = range(2, 3)
    needs = "must name two columns: the query, and the list of documents"
    files = ("{}.jsonl",)
    needs_label = True

    def read(self, path: epath.Path, columns: Sequence[str], label: str, candidates: str) -> ListSet:
        """Reads the rows of a .jsonl."""
        query, documents = columns
        lists = []
        for row in rows_with_columns(path, columns, label):
            texts = [_text(row, documents, value) for value in _list(row, documents, "texts")]
            grades = [_number(Row({label: value}, row.where), label) for value in _list(row, label, "numbers")]
            if len(texts) != len(grades):
                raise UserError(
                    f"{row.where}: {len(texts)} documents in {documents}, but {len(grades)} numbers in {label}; each "
                    f"document needs a number"
                )
            lists.append(_make_list(row.where, texts_of(row, [query])[0], texts, grades))
        return ListSet(lists)


class RerankingSamples(ListForm):
    """A query, a list of relevant documents, and a list of other documents or a ranked list, in JSON lines.

    The columns are the fields of the samples of sentence-transformers' CrossEncoderRerankingEvaluator: `query`,
    `positive`, and `negative` or `documents`. `documents` are the ranking of a first stage. Positives that are not in
    `documents` are appended, as the evaluator does by default (`always_rerank_positives`).
    """

    files = ("{}.jsonl",)

    def read(self, path: epath.Path, columns: Sequence[str], label: str, candidates: str) -> ListSet:
        """Reads the rows of a .jsonl."""
        lists, names = [], set()
        for row in rows_with_columns(path, ["query", "positive"]):
            positives = [_text(row, "positive", value) for value in _list(row, "positive", "texts")]
            name = "documents" if "documents" in row.columns else "negative"
            if row.columns.keys() >= {"documents", "negative"}:
                raise UserError(f"{row.where}: has both 'documents' and 'negative'; use one of both in all rows")
            names.add(name)
            if len(names) > 1:
                raise UserError(f"{row.where}: has {name!r}, but earlier rows have not; use one of both in all rows")
            others = [_text(row, name, value) for value in _list(row, name, "texts")]
            appended = list(dict.fromkeys(text for text in positives if text not in set(others)))
            documents = [*others, *appended] if name == "documents" else [*positives, *others]
            if not positives:
                raise UserError(f"{row.where}: positive is an empty list; a query needs a relevant document")
            grades = [float(document in set(positives)) for document in documents]
            ranking = _make_list(row.where, texts_of(row, ["query"])[0], documents, grades)
            lists.append(ranking._replace(appended=len(appended) if name == "documents" else 0))
        return ListSet(lists, "documents" in names)


class SquadLists(ListForm):
    """A question and the paragraph with its answer, in a file of SQuAD's format."""

    files = tuple(f"{{}}-{version}.json" for version in VERSIONS)

    def read(self, path: epath.Path, columns: Sequence[str], label: str, candidates: str) -> ListSet:
        """Reads the questions that have an answer."""
        questions = squad_files.read_squad(path)
        lists = [RankingList(question.text, (question.context,), (1.0,)) for question in questions if question.answers]
        if not lists:
            raise UserError(f"{path}: has no question with an answer; add at least one")
        return ListSet(lists, skipped={"questions without an answer": len(questions) - len(lists)})


class BeirLists(ListForm):
    """Queries, documents and relevance grades in a folder of BEIR's format.

    A list has the candidates of a query, or without candidates its judged documents.
    """

    files = ("qrels/{}.tsv",)
    has_ids = True

    def read(self, path: epath.Path, columns: Sequence[str], label: str, candidates: str) -> ListSet:
        """Reads the queries that have a relevant document."""
        folder = path.parent.parent
        documents = dict(read_texts_by_id(folder / "corpus.jsonl"))
        queries = dict(read_texts_by_id(folder / "queries.jsonl"))
        judged = {
            query: {name: max(0.0, grade) for name, grade in grades.items()}
            for query, grades in read_judgements(path, queries, documents).items()
        }
        ranked = trec.read_run(candidates) if candidates else {}
        trec.check_ids(queries, ranked, candidates, folder / "queries.jsonl", "query")
        used = (name for names in ranked.values() for name in names)
        trec.check_ids(documents, used, candidates, folder / "corpus.jsonl", "document")
        lists, skipped = [], {NO_RELEVANT: 0, "queries without candidates": 0}
        for query, grades in judged.items():
            names = ranked.get(query, []) if candidates else list(grades)
            if not any(grades.values()):
                skipped[NO_RELEVANT] += 1
            elif not names:
                skipped["queries without candidates"] += 1
            else:
                graded: dict[str, float] = {}
                for name in names:  # Two ids can have the same text.
                    graded[documents[name]] = max(grades.get(name, 0.0), graded.get(documents[name], 0.0))
                relevant = ((documents[name], grade) for name, grade in grades.items() if grade > 0)
                missing = {text: grade for text, grade in relevant if text not in graded}
                lists.append(_ranking(queries[query], graded, missing))
        if not lists:
            raise UserError(
                f"{candidates}: has no candidates for the queries of {path}; name the run file of these queries"
            )
        return ListSet(lists, bool(candidates), skipped)


def _ranking(query: str, graded: Mapping[str, float], missing: Mapping[str, float] = NOTHING) -> RankingList:
    """Returns a list from {document: grade}."""
    return RankingList(query, tuple(graded), tuple(graded.values()), tuple(missing.items()))


FORMS: dict[str, ListForm] = {
    "pairs": QueriesWithNegatives(),
    "labelled": LabelledDocuments(),
    "lists": DocumentLists(),
    "rerank": RerankingSamples(),
    "squad": SquadLists(),
    "search": BeirLists(),
}


def _make_list(
    where: str, query: str, documents: Iterable[str], grades: Iterable[float], first_wins: bool = False
) -> RankingList:
    """Returns a list. A repeated document counts once.

    Args:
      where: FILE:LINE, for messages.
      query: the query.
      documents: the documents.
      grades: the grades.
      first_wins: whether a repeated document keeps its first grade; otherwise two different grades are an error.
    """
    graded: dict[str, float] = {}
    for document, grade in zip(documents, grades, strict=True):
        if graded.setdefault(document, grade) != grade and not first_wins:
            raise UserError(
                f"{where}: the document {document[:40]!r} has the grades {graded[document]:g} and {grade:g}; keep one"
            )
    if not graded:
        raise UserError(f"{where}: the list of documents is empty; a list needs at least one document")
    return _ranking(query, graded)


def label_columns(label: str) -> list[str]:
    """Returns the columns that `label` names, separated by commas."""
    return [name.strip() for name in split_at_commas(label) if name.strip()]


def _number(row: Row, name: str) -> float:
    """Returns the finite number in a column."""
    if isinstance(value := cell(row, name), (list, dict)):
        raise UserError(f"{row.where}: {name} has {value!r:.60}, expected a number")
    return NumberLabel().value(row, name)


def _list(row: Row, name: str, kind: str) -> list[Any]:
    """Returns the list in a column of JSON."""
    if not isinstance(value := cell(row, name), list):
        raise UserError(f"{row.where}: {name} is {value!r:.60}, expected a list of {kind}")
    return value


def _text(row: Row, name: str, value: object) -> str:
    """Returns a document of a list: a text, or an object with the fields `text` and perhaps `title`."""
    if isinstance(value, dict):
        value = document_of(Row(value, row.where))
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{row.where}: {name} has {value!r:.60}, expected texts that are not empty")
    return value.strip()
