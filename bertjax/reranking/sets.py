"""The sets of lists that a config, or the flags of a command, name."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.data.corpus import holdout
from bertjax.embedding.datasets import FlagSource, Source
from bertjax.embedding.forms import FileForm
from bertjax.finetuning.classification import windows_of
from bertjax.interop.cross_encoder import query_prompt_of
from bertjax.reranking.forms import FORMS, NO_RELEVANT, ListSet, label_columns
from bertjax.reranking.lists import ListExamples, PairEncoder
from bertjax.text.tokenizer import Tokenizer

SECTION = ("path", "form", "texts", "label", "candidates")  # the fields of a section about a set


@dataclasses.dataclass(frozen=True)
class ListSource(Source):
    """The location and the form of a set of lists.

    Attributes:
      candidates: a run file of TREC with the candidates of each query; "" for none.
    """

    forms: ClassVar[Mapping[str, FileForm]] = FORMS
    candidates: str = ""

    def validate(self, forms: Collection[str] = ()) -> None:
        """Raises `UserError` for invalid fields, without reading the file."""
        super().validate(forms)
        form = FORMS[self.form]
        needs = "must name the column of the grades"
        self.require(bool(self.label) or not form.needs_label, "label", needs)
        if self.form == "pairs":
            documents, count = len(self.columns) - 1, len(label_columns(self.label))
            needs = (
                f"names {count} columns, expected {documents} (the score of each document) or {documents - 1} (the "
                f"difference between the positive and each negative)"
            )
            self.require(count in (0, documents, documents - 1), "label", needs)
        with_ids = "a run file names documents by ids, which only form=search has; leave the field out"
        self.require(not self.candidates or form.has_ids, "candidates", with_ids)

    def read(self, *parts: str) -> ListSet:
        """Reads the lists of a file, or of the file of one of `parts` in a folder. Raises the errors of the form."""
        form = FORMS[self.form]
        lists = form.read(self.file_of(parts), self.columns, self.label, self.candidates)
        self.require(bool(lists.lists), "path", "has no list; add a query with documents")
        return lists


class ListFlagSource(ListSource, FlagSource):
    """A set of lists that the flags of a command describe; the path is the flag --data."""


def training_set(data: ConfigDict) -> ListSource:
    """Returns the training set."""
    return ListSource("data", **{name: data[name] for name in SECTION})


def dev_set(data: ConfigDict) -> ListSource:
    """Returns the dev set. Unset fields of `data.dev` are the fields of `data`; candidates are not inherited."""
    inherited = frozenset(name for name in SECTION if not data.dev[name] and name != "candidates")
    fields = {name: (data if name in inherited else data.dev)[name] for name in SECTION}
    return ListSource("data.dev", **fields, inherited=inherited)


def read_dev(source: ListSource) -> ListSet:
    """Reads the dev set. In a folder without a dev file, the test file is the dev set."""
    has_dev = any((epath.Path(source.path) / name.format("dev")).exists() for name in FORMS[source.form].files)
    return source.read("dev") if has_dev else source.read("dev", "test")


def is_divided(data: ConfigDict) -> bool:
    """Returns whether a tenth of the queries of `data.path`, which is one file, is held out as the dev set."""
    if "path" not in dev_set(data).inherited or not epath.Path(data.path).is_file():
        return False
    if field := next((name for name in SECTION if data.dev[name]), None):
        raise UserError(
            f"config.data.dev.{field} = {data.dev[field]!r}: config.data.path is one file, whose held-out queries are "
            f"the dev set; also set data.dev.path, or leave data.dev out"
        )
    return True


def divide(lists: ListSet, data: ConfigDict) -> tuple[ListSet, ListSet, str]:
    """Returns the training lists, the held-out lists, and the line that states the split.

    All lists of a query are in the same part.

    Raises:
      UserError: if there are too few queries.
    """
    queries = list(dict.fromkeys(ranking.query for ranking in lists.lists))
    chosen = holdout.choose_heldout([()] * len(queries), holdout.seed_of(data))
    holdout.require_heldout(len(chosen), len(queries), data, "queries")
    held_out = {queries[number] for number in chosen}
    parts = [[ranking for ranking in lists.lists if (ranking.query in held_out) == is_dev] for is_dev in (False, True)]
    train, dev = (lists._replace(lists=part) for part in parts)
    return train, dev, holdout.describe_split(len(chosen), len(queries), data, "queries")


def encoder_of(config: ConfigDict, tokenizer: Tokenizer, max_seq_length: int) -> PairEncoder:
    """Returns the encoder of the pairs of a run."""
    return PairEncoder(tokenizer, max_seq_length, windows_of(config), query_prompt_of(config))


def encode_lists(lists: ListSet, encoder: PairEncoder, negatives: int = 0) -> ListExamples:
    """Encodes lists. Each distinct text is tokenized once.

    Args:
      lists: the lists.
      encoder: encodes the pairs.
      negatives: the number of in-batch negatives of a list.
    """
    queries: dict[str, int] = {}
    documents: dict[str, int] = {}
    list_queries = [queries.setdefault(ranking.query, len(queries)) for ranking in lists.lists]
    list_documents = [
        np.array([documents.setdefault(text, len(documents)) for text in ranking.documents]) for ranking in lists.lists
    ]
    elsewhere: dict[int, list[int]] = {}
    for query, ranking in zip(list_queries, lists.lists):
        if known := [documents[text] for text, _ in ranking.missing if text in documents]:
            elsewhere.setdefault(query, []).extend(known)
    query_ids = encoder.tokenizer.encode_ids([encoder.query_prompt + query for query in queries])
    document_ids = encoder.tokenizer.encode_ids(list(documents))
    return ListExamples(
        [],
        [],
        encoder=encoder,
        query_ids=query_ids,
        document_ids=document_ids,
        list_queries=np.array(list_queries),
        list_documents=list_documents,
        grades=[np.array(ranking.grades, np.float32) for ranking in lists.lists],
        negatives=negatives,
        relevant_elsewhere=elsewhere,
    )


def single_documents(lists: ListSet) -> ListSet:
    """Returns a list for each pair of a query and a document, for losses of single pairs."""
    pairs = [
        ranking._replace(documents=(document,), grades=(grade,))
        for ranking in lists.lists
        for document, grade in zip(ranking.documents, ranking.grades)
    ]
    return lists._replace(lists=pairs)


def positives_first(lists: ListSet) -> tuple[ListSet, int]:
    """Returns lists that begin with the only relevant document, for losses that compare one positive with negatives.

    A list with several relevant documents becomes several lists with the same negatives.

    Returns:
      The lists, and the number of lists that were left out because they have no relevant document.
    """
    divided = []
    for ranking in lists.lists:
        pairs = list(zip(ranking.documents, ranking.grades))
        negatives = tuple(document for document, grade in pairs if grade <= 0)
        for document, grade in pairs:
            if grade > 0:
                grades = (grade, *[0.0] * len(negatives))
                divided.append(ranking._replace(documents=(document, *negatives), grades=grades))
    dropped = sum(not any(grade > 0 for grade in ranking.grades) for ranking in lists.lists)
    return lists._replace(lists=divided), dropped


def sorted_by_grade(lists: ListSet) -> ListSet:
    """Returns lists whose documents are in descending order of their grades."""

    def ordered(ranking: Sequence[float]) -> list[int]:
        return sorted(range(len(ranking)), key=lambda i: -ranking[i])

    result = []
    for ranking in lists.lists:
        order = ordered(ranking.grades)
        documents = tuple(ranking.documents[i] for i in order)
        result.append(ranking._replace(documents=documents, grades=tuple(ranking.grades[i] for i in order)))
    return lists._replace(lists=result)


def judged(lists: ListSet, source: ListSource) -> ListSet:
    """Returns the lists with a relevant document, for an evaluation.

    In rows with a positive, scores of a teacher are not grades.

    Raises:
      UserError: if no query has a relevant document, or if no order of the documents can be right or wrong.
    """
    graded = lists.lists
    if source.form == "pairs":
        graded = [ranking._replace(grades=(1.0, *[0.0] * (len(ranking.documents) - 1))) for ranking in graded]
    kept = [ranking for ranking in graded if ranking.missing or max(ranking.grades) > 0]
    source.require(bool(kept), "path", "no query has a relevant document; add a grade above 0")
    skipped = {**lists.skipped, NO_RELEVANT: lists.skipped.get(NO_RELEVANT, 0) + len(graded) - len(kept)}
    lists = lists._replace(lists=kept, skipped=skipped)
    require_comparison(lists, source)
    return lists


def skipped_lines(name: str, lists: ListSet) -> list[str]:
    """Returns lines about the queries without a list."""
    return [f"{name}: {count:,} {reason} skipped" for reason, count in lists.skipped.items() if count]


def require_comparison(lists: ListSet, source: ListSource) -> None:
    """Raises `UserError` unless a list has documents with different grades, so that an order can be right or wrong."""
    if not any(len({*ranking.grades}) > 1 for ranking in lists.lists):
        raise UserError(
            f"{source.setting('path')}: in each list, all documents have the same grade; add documents with other "
            f"grades, such as negatives of bertjax mine"
        )
