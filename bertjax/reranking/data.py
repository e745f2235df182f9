"""Reads the training set and the dev set of a reranker, and computes the scores of a teacher."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.finetuning.contamination import seen_in_training
from bertjax.inference.heads import Head
from bertjax.inference.task import HasTeacherTargets, TaskData
from bertjax.interop.pretrained import Pretrained
from bertjax.reranking import sets
from bertjax.reranking.evaluator import METRIC, describe, make_split
from bertjax.reranking.forms import ListSet, RankingList
from bertjax.reranking.losses import POINTWISE
from bertjax.reranking.ranking import Ranker, is_reranker
from bertjax.reranking.sets import ListSource
from bertjax.text.tokenizer import Tokenizer

ONE_POSITIVE = ("multiple_negatives",)  # losses that compare one relevant document with the other documents
BEST_FIRST = ("margin_mse",)  # losses that compare the first document with the other documents
MORE_METRICS = ("mrr@10", "map")


@dataclasses.dataclass(frozen=True)
class RerankingData(TaskData, HasTeacherTargets):
    """The data of a reranker.

    Attributes:
      lists: the training lists, for a teacher; empty without a teacher.
    """

    lists: Sequence[RankingList] = ()

    def teacher_targets(self, teacher: Pretrained) -> list[np.ndarray]:
        """Returns the teacher's scores of the documents of each list, without the activation of a CrossEncoder."""
        if not is_reranker(teacher):
            raise UserError(
                f"config.distill.teacher = {teacher.path!r}: computes no score for a pair of texts; choose a run of "
                f"rerank, a CrossEncoder, or a classifier with one label"
            )
        pairs = [(ranking.query, document) for ranking in self.lists for document in ranking.documents]
        ends = np.cumsum([len(ranking.documents) for ranking in self.lists])
        return np.split(Ranker(teacher).logits(pairs), ends[:-1])


def load(config: ConfigDict, tokenizer: Tokenizer, head: Head) -> RerankingData:
    """Reads the training set and the dev set. Raises `UserError` for missing or invalid files."""
    data, notes = config.data, list[str]()
    train_source, dev_source = sets.training_set(data), sets.dev_set(data)
    if sets.is_divided(data):
        train, dev, note = sets.divide(train_source.read("train"), data)
        notes.append(note)
    else:
        train, dev = train_source.read("train"), sets.read_dev(dev_source)
    dev = sets.judged(dev, dev_source)
    train, more_notes = training_lists(train, train_source, config)
    notes += more_notes
    encoder = sets.encoder_of(config, tokenizer, config.max_seq_length)
    negatives = config.loss.negatives if config.loss.name == "multiple_negatives" else 0
    examples, dev_examples = sets.encode_lists(train, encoder, negatives), sets.encode_lists(dev, encoder)
    notes += [describe("training", train.lists, examples), describe("dev", dev.lists, dev_examples)]
    for name, lists in (("training", train), ("dev", dev)):
        notes += sets.skipped_lines(name, lists)
    queries = {ranking.query for ranking in train.lists}
    notes += seen_in_training(queries, ("dev queries", {ranking.query for ranking in dev.lists}))
    split = make_split(dev, dev_examples)
    unsorted = [np.zeros(len(ranking.documents)) for ranking in dev.lists]
    more_metrics = (*MORE_METRICS, *(f"base_{name}" for name in (METRIC, *MORE_METRICS) if dev.is_ranked))
    return RerankingData(
        head,
        (),
        examples,
        (split,),
        METRIC,
        tuple(notes),
        split.score(unsorted)[METRIC],
        more_metrics,
        lists=tuple(train.lists) if config.distill.teacher else (),
    )


def training_lists(train: ListSet, source: ListSource, config: ConfigDict) -> tuple[ListSet, list[str]]:
    """Returns the lists in the form that the loss needs, and lines to print.

    Raises:
      UserError: if the lists do not fit the loss.
    """
    name = config.loss.name
    notes: list[str] = []
    if name in POINTWISE:
        train = sets.single_documents(train)
        grades = [grade for ranking in train.lists for grade in ranking.grades]
        if name == "binary_cross_entropy" and not config.distill.teacher and not all(0 <= x <= 1 for x in grades):
            wrong = next(grade for grade in grades if not 0 <= grade <= 1)
            raise UserError(
                f"config.loss.name = {name!r}: the training data has the grade {wrong:g}, expected grades from 0 to 1; "
                f"choose mse, list_net or lambda for other grades"
            )
        return train, notes
    if name in ONE_POSITIVE:
        train, dropped = sets.positives_first(train)
        notes += [f"training: {dropped:,} queries without a relevant document skipped"] if dropped else []
        source.require(bool(train.lists), "path", "no query has a relevant document; add a grade above 0")
        documents = {document for ranking in train.lists for document in ranking.documents}
        source.require(len(documents) > 1, "path", "all queries have the same document; add other documents")
        if not config.loss.negatives and all(len(ranking.documents) == 1 for ranking in train.lists):
            raise UserError(
                "config.loss.negatives = 0: no query has a document with the grade 0; add such documents, or set "
                "loss.negatives=4"
            )
        return train, notes
    kept = [ranking for ranking in train.lists if len(ranking.documents) > 1]
    pointwise = "mse" if config.distill.teacher else "binary_cross_entropy"
    remedy = f"add negatives, for example with bertjax mine, or set loss.name={pointwise}"
    source.require(bool(kept), "path", f"each list has one document, but {name} compares documents; {remedy}")
    if not config.distill.teacher:
        sets.require_comparison(train, source)
    if name in BEST_FIRST and source.form != "pairs":
        train = sets.sorted_by_grade(train)
        kept = [ranking for ranking in train.lists if len(ranking.documents) > 1]
    if dropped := len(train.lists) - len(kept):
        notes.append(f"training: {dropped:,} lists with one document skipped, because the loss compares documents")
    return train._replace(lists=kept), notes
