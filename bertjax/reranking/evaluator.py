"""Evaluates rerankers: the metrics of the rankings of documents, before and after reranking.

The metrics are the metrics of CrossEncoderRerankingEvaluator of sentence-transformers.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from bertjax.finetuning.classification import Windows
from bertjax.inference.task import Split
from bertjax.reranking.forms import ListSet, RankingList
from bertjax.reranking.lists import ListExamples, StepPairs
from bertjax.reranking.metrics import mean_metrics
from bertjax.training.checkpoints import workdir

METRIC = "ndcg@10"  # ranks runs


@dataclasses.dataclass(frozen=True)
class RankedLists(Split):
    """Lists that a reranker is evaluated on. An example is a pair of texts, or a window of the document of a pair.

    Attributes:
      lists: the lists.
      owners: `[examples]`, the number of the pair of each example.
      windows: the windows of long documents.
    """

    lists: ListSet
    owners: np.ndarray
    windows: Windows

    def decode(self, outputs: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the scores of the documents of each list, `[documents]` each."""
        scores = np.stack(self.windows.combined(outputs, self.owners))[:, 0]
        return np.split(scores, np.cumsum([len(ranking.documents) for ranking in self.lists.lists])[:-1])

    def score(self, predictions: list[np.ndarray]) -> dict[str, float]:
        """Returns the metrics of scores, and of the order of the candidates with the prefix "base_"."""
        grades = [ranking.grades for ranking in self.lists.lists]
        missing = [[grade for _, grade in ranking.missing] for ranking in self.lists.lists]
        scores = mean_metrics(predictions, grades, missing=missing)
        if not self.lists.is_ranked:
            return scores
        ranks = [-np.arange(len(ranking.documents)) for ranking in self.lists.lists]
        before = mean_metrics(ranks, list(map(_grades_of_candidates, self.lists.lists)), missing=missing)
        return scores | {f"base_{name}": value for name, value in before.items()}

    def remark(self, scores: Mapping[str, float | None]) -> str:
        """Returns a warning if the reranker makes the order of the candidates worse."""
        after, before = scores.get(METRIC), scores.get(f"base_{METRIC}")
        if after is None or before is None or after >= before:
            return ""
        return (
            f"warning: {METRIC} is below base_{METRIC}: the reranker makes the order of the candidates worse. Train it "
            f"on more queries, for more steps, with a higher learning rate, or with --config.loss.name=list_net"
        )

    def files(self, predictions: list[np.ndarray]) -> dict[str, str]:
        """Returns the file with a few queries, their best documents and the first documents of the reranker."""
        rows = []
        for number in workdir.sample_indices(len(self.lists.lists)):
            ranking = self.lists.lists[number]
            best, predicted = (ranking.documents[int(np.argmax(x))] for x in (ranking.grades, predictions[number]))
            rows.append((ranking.query, best, predicted))
        return workdir.samples_file(rows)


def _grades_of_candidates(ranking: RankingList) -> Sequence[float]:
    """Returns the grades, or zeros if the first stage found no relevant document."""
    candidates = ranking.grades[: len(ranking.grades) - ranking.appended]
    return ranking.grades if any(grade > 0 for grade in candidates) else [0.0] * len(ranking.grades)


def make_split(lists: ListSet, examples: ListExamples) -> RankedLists:
    """Returns lists as a split that a reranker is evaluated on.

    Args:
      lists: the lists.
      examples: the encoded lists, without in-batch negatives.
    """
    sizes = [len(documents) for documents in examples.list_documents]
    numbers = np.repeat(np.arange(len(examples)), sizes)
    pairs = StepPairs(
        numbers,
        np.concatenate([np.arange(size) for size in sizes]),
        examples.list_queries[numbers],
        np.concatenate(examples.list_documents),
        np.concatenate(examples.grades),
    )
    encoded, owners = examples.encoded_with_owners(pairs)
    return RankedLists(encoded, lists, owners, examples.encoder.windows)


def describe(name: str, lists: Sequence[RankingList], examples: ListExamples) -> str:
    """Returns a line about lists: their number, their lengths and the truncated pairs. A list of one is a pair."""
    sizes = [len(ranking.documents) for ranking in lists]
    relevant = sum(grade > 0 for ranking in lists for grade in ranking.grades)
    span = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    groups = "" if max(sizes) == 1 else f"{len(lists):,} lists of {span} documents, "
    line = f"{name}: {groups}{sum(sizes):,} pairs, {relevant:,} of them relevant"
    cut, longest = examples.count_truncated(), examples.encoder.max_seq_length
    if not cut:
        return line
    return f"{line}; {cut:,} pairs truncated to {longest} tokens; --config.max_seq_length keeps more"
