"""The forms of examples that embeddings are trained on and evaluated on, and the files that contain them."""

import abc
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.lists import split_at_commas
from bertjax.data.corpus.tables import SUFFIXES, Row, TableRows, check_columns, column, read_table, read_text
from bertjax.embedding import retrieval
from bertjax.embedding.retrieval import Search
from bertjax.finetuning import squad_files
from bertjax.finetuning.labels import NumberLabel
from bertjax.finetuning.tasks.squad import VERSIONS

MOST = 100  # columns of texts


class TextSet(NamedTuple):
    """The examples of a set.

    Attributes:
      texts: the texts of each example; all examples have the same number of texts.
      values: the score or the label of each example. None: the second text of an example is the positive of the first
        text, and all further texts are negatives.
      skipped: {reason: number of rows of the file that are left out for this reason}.
      scores: the score of each document of each example, by a teacher, `[examples, texts - 1]`; None without scores.
    """

    texts: Sequence[tuple[str, ...]]
    values: np.ndarray | None = None
    skipped: Mapping[str, int] = types.MappingProxyType({})
    scores: np.ndarray | None = None

    @property
    def labels(self) -> np.ndarray:
        """The values. Without values, the number of each text, `[examples, texts]`; equal texts have equal numbers."""
        if self.values is not None:
            return self.values
        return np.reshape(number_texts(text for example in self.texts for text in example)[0], (len(self.texts), -1))

    def describe(self, name: str) -> str:
        """Returns the number of examples as text."""
        return f"{len(self.texts)} {name} examples"


def number_texts(texts: Iterable[str]) -> tuple[np.ndarray, list[str]]:
    """Returns the number of each text, and the distinct texts by number."""
    numbers: dict[str, int] = {}
    text_numbers = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)
    return text_numbers, list(numbers)


class FileForm:
    """The form of the files of a set.

    Attributes:
      columns: the allowed numbers of columns of texts; empty if the file determines its texts.
      needs: the requirement of `columns`, for messages.
      files: the possible names of the file of a set in a folder; {} stands for train or dev.
      has_ids: whether the queries and the documents have ids.
      has_queries: whether the first text is a query, and the other texts are documents. Their prompts differ.
    """

    columns: ClassVar[range] = range(0)
    needs: ClassVar[str] = ""
    files: ClassVar[tuple[str, ...]] = tuple("{}" + suffix for suffix in SUFFIXES)
    has_ids: ClassVar[bool] = False
    has_queries: ClassVar[bool] = False


class Form(FileForm, abc.ABC):
    """The form of the examples of a set that embeddings are trained on or evaluated on.

    Attributes:
      value_type: the type of the scores or labels of a set; None without values.
    """

    value_type: ClassVar[type | None] = None

    @abc.abstractmethod
    def read(self, path: epath.Path, columns: Sequence[str], label: str) -> TextSet:
        """Reads a set.

        Args:
          path: the file.
          columns: the columns of the texts.
          label: the column of the label.

        Raises:
          UserError: for an invalid example. The message has the file and the line.
        """

    def read_search(self, path: epath.Path, columns: Sequence[str], label: str) -> Search:
        """Reads the queries and the documents of a set that has queries. The arguments are the arguments of `read`."""
        return retrieval.of_texts(self.read(path, columns, label).texts)


class Pairs(Form):
    """A query, its positive, and any number of negatives."""

    columns = range(2, MOST)
    needs = "must name two columns or more: query, positive, negatives"
    has_queries = True

    def read(self, path: epath.Path, columns: Sequence[str], label: str) -> TextSet:
        """Reads the rows of a table. `label` can name the columns of scores, see `score_columns`."""
        names = score_columns(label)
        rows = rows_with_columns(path, columns, *names)
        texts = [texts_of(row, columns) for row in rows]
        if not names:
            return TextSet(texts)
        scores = np.array([[NumberLabel().value(row, name) for name in names] for row in rows], np.float32)
        return TextSet(texts, scores=scores)

    def read_search(self, path: epath.Path, columns: Sequence[str], label: str) -> Search:
        """Reads the queries and the documents, without scores."""
        return super().read_search(path, columns, "")


def score_columns(label: str) -> tuple[str, ...]:
    """Returns the columns with a score for each document, which `label` names, such as score_1,score_2.

    One column is no list: the default value of `data.label` has no effect on `Pairs`.
    """
    names = tuple(map(str.strip, split_at_commas(label)))
    return names if len(names) > 1 else ()


class ScoredPairs(Form):
    """Two texts and a score of their similarity."""

    columns = range(2, 3)
    needs = "must name two columns, because scored pairs have two texts"
    value_type = np.float32

    def read(self, path: epath.Path, columns: Sequence[str], label: str) -> TextSet:
        """Reads the rows of a table."""
        rows = rows_with_columns(path, columns, label)
        scores = np.array([NumberLabel().value(row, label) for row in rows], np.float32)
        _check_values(path, label, scores, "scores")
        return TextSet([texts_of(row, columns) for row in rows], scores)


class LabelledPairs(Form):
    """Two texts and the label 1 if they belong together, else 0."""

    columns = range(2, 3)
    needs = "must name two columns, because labelled pairs have two texts"
    value_type = np.int32

    def read(self, path: epath.Path, columns: Sequence[str], label: str) -> TextSet:
        """Reads the rows of a table."""
        rows = rows_with_columns(path, columns, label)
        for row in rows:
            if (value := NumberLabel().value(row, label)) not in (0, 1):
                raise UserError(
                    f"{row.where}: {label} is {value:g}, expected 1 for texts that belong together, and 0 for other "
                    f"texts; set form=scored for other numbers"
                )
        labels = np.array([NumberLabel().value(row, label) for row in rows], np.int32)
        _check_values(path, label, labels, "labels")
        return TextSet([texts_of(row, columns) for row in rows], labels)


class Sentences(Form):
    """Single texts. An example pairs a text with itself, and dropout makes the embeddings differ (Gao et al. 2021)."""

    columns = range(1, MOST)
    needs = "must name the column of the sentences"
    files = ("{}.txt", *Form.files)

    def read(self, path: epath.Path, columns: Sequence[str], label: str) -> TextSet:
        """Reads the lines of a .txt, or the first column of a table."""
        if path.suffix == ".txt":
            lines = [line.strip() for line in read_text(path).splitlines()]
        else:
            lines = [texts_of(row, columns[:1])[0] for row in rows_with_columns(path, columns[:1])]
        pairs = [(text, text) for text in lines if text]
        if not pairs:
            raise UserError(f"{path}: has no text; add at least one")
        return TextSet(pairs, skipped={"empty": len(lines) - len(pairs)})


class SquadQuestions(Form):
    """A question and the paragraph with its answer, in a file of SQuAD's format."""

    files = tuple(f"{{}}-{version}.json" for version in VERSIONS)
    has_queries = True

    def read(self, path: epath.Path, columns: Sequence[str], label: str) -> TextSet:
        """Reads the questions that have an answer."""
        questions = squad_files.read_squad(path)
        pairs = [(question.text, question.context) for question in questions if question.answers]
        if not pairs:
            raise UserError(f"{path}: has no question with an answer; add at least one")
        return TextSet(pairs, skipped={"questions without an answer": len(questions) - len(pairs)})


class Beir(Form):
    """Queries, documents and relevance grades in a folder of BEIR's format."""

    files = ("qrels/{}.tsv",)
    has_queries = True
    has_ids = True

    def read(self, path: epath.Path, columns: Sequence[str], label: str) -> TextSet:
        """Reads each query with each document that is relevant to it."""
        return TextSet(retrieval.read_retrieval_set(path).texts)

    def read_search(self, path: epath.Path, columns: Sequence[str], label: str) -> Search:
        """Reads the queries and the documents with their ids and grades."""
        return retrieval.read_retrieval_set(path)


FORMS: dict[str, Form] = {
    "pairs": Pairs(),
    "scored": ScoredPairs(),
    "labelled": LabelledPairs(),
    "sentences": Sentences(),
    "squad": SquadQuestions(),
    "search": Beir(),
}
WITH_QUERIES = tuple(name for name, form in FORMS.items() if form.has_queries)
JUDGES = tuple(name for name in FORMS if name != "sentences")  # forms that embeddings can be evaluated on


def _check_values(path: epath.Path, label: str, values: np.ndarray, name: str) -> None:
    if (values == values[0]).all():
        raise UserError(f"{path}: all {name}, in column {label!r}, are {values[0]:g}; use data with different values")


def rows_with_columns(path: epath.Path, columns: Sequence[str], *labels: str) -> TableRows:
    """Returns the rows of a table. Raises `UserError` if the first row lacks a column."""
    rows, _ = read_table(path)
    check_columns(rows[0], {"data.texts": columns, "data.label": labels})
    return rows


def texts_of(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    """Returns the texts of a row. Raises `UserError` if one is empty."""
    texts = tuple(column(row, name).strip() for name in columns)
    for name, text in zip(columns, texts):
        if not text:
            raise UserError(f"{row.where}: {name} is empty; an example needs {len(columns)} texts")
    return texts
