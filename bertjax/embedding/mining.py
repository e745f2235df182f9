"""Hard negatives for the training of embeddings: documents that are similar but not relevant to a query."""

import dataclasses
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import replacing
from bertjax.common.progress import Bar
from bertjax.data.corpus.tables import TableWriter
from bertjax.embedding.neighbors import nearest
from bertjax.embedding.retrieval import Search
from bertjax.finetuning.metrics import comparable

REMEDIES = {  # {reason to reject a candidate: fix}
    "nearer than the margin allows": "lower --margin, or raise --last",
    "above the highest cosine": "raise --max_score or --last",
    "below the lowest cosine": "lower --min_score",
}
MARGIN, MOST, LEAST = REMEDIES
MORE_DOCUMENTS = "name more documents with --corpus, or lower --negatives or --first"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The rules that choose the negatives of a query. Candidates are the documents that are not relevant to the query.

    Attributes:
      negatives: the number of negatives.
      first: the rank of the nearest allowed candidate; 1 is the nearest of all candidates.
      last: the rank of the farthest allowed candidate.
      margin: the minimum difference between the cosine of each relevant document and the cosine of a negative.
      is_share: whether `margin` is a share of the cosine of the relevant document.
      least: the lowest allowed cosine of a negative.
      most: the highest allowed cosine.
      seed: the seed of a random choice among the allowed candidates; None chooses the nearest candidates.
    """

    negatives: int = 1
    first: int = 1
    last: int = 100
    margin: float = -np.inf
    is_share: bool = False
    least: float = -np.inf
    most: float = np.inf
    seed: int | None = None


class Mined(NamedTuple):
    """The negatives of a search.

    Attributes:
      rows: (index of the query, indices of its negatives, the nearest first) of each query with enough negatives.
      candidates: the number of candidates with an allowed rank, summed over all queries.
      dropped: the number of rejected candidates by reason.
      cosines: the mean cosine of the relevant documents, and of the negatives; NaN without negatives.
      reasons: like `dropped`, but only for the queries with too few negatives.
      inverted: the number of queries with a negative that is nearer than a relevant document.
    """

    rows: list[tuple[int, list[int]]]
    candidates: int
    dropped: Counter[str]
    cosines: tuple[float, float]
    reasons: Counter[str]
    inverted: int


def mine_negatives(
    search: Search, queries: np.ndarray, documents: np.ndarray, choice: Choice, similarity: str = "cosine"
) -> Mined:
    """Returns hard negatives for queries. A negative never has the text or the id of its query.

    Args:
      search: the queries and documents; each text occurs once.
      queries: the embeddings of the queries, `[queries, width]`.
      documents: the embeddings of the documents, `[documents, width]`.
      choice: the rules.
      similarity: "cosine", or "dot" to use dot products in place of all cosines.
    """
    relevant = [set(grades) for grades in search.relevant]
    numbers = {document: number for number, document in enumerate(search.documents)}
    identical = search.identical or [-1] * len(search.queries)
    same = ({numbers.get(query, -1), number} - {-1} for query, number in zip(search.queries, identical))
    excluded = [numbers_of_query | more for numbers_of_query, more in zip(relevant, same)]
    retrieved = choice.last + max(map(len, excluded))
    with Bar("comparing", [len(queries) * len(documents)], " pairs") as bar:
        neighbours = nearest(queries, documents, retrieved, similarity, bar)
    rows, candidate_count, inverted = [], 0, 0
    positive_means: list[float] = []
    negative_means: list[float] = []
    dropped: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for query, (candidates, cosines) in enumerate(zip(*neighbours)):
        is_candidate = [number not in excluded[query] for number in candidates.tolist()]
        ranks = slice(choice.first - 1, choice.last)
        candidates, cosines = candidates[is_candidate][ranks], cosines[is_candidate][ranks]
        positives = comparable(documents[list(relevant[query])], similarity) @ comparable(queries[query], similarity)
        limits = {
            MARGIN: cosines <= _limit(positives.min(), choice),
            MOST: cosines <= choice.most,
            LEAST: cosines >= choice.least,
        }
        candidate_count += len(candidates)
        is_left = np.ones(len(candidates), bool)
        dropped_here: Counter[str] = Counter()
        for reason, fits in limits.items():
            dropped_here[reason] = int((is_left & ~fits).sum())
            is_left &= fits
        dropped += dropped_here
        places = np.flatnonzero(is_left)
        if len(places) < choice.negatives:
            reasons += dropped_here
            continue
        if choice.seed is not None:
            random = np.random.default_rng([choice.seed, query])
            places = np.sort(random.choice(places, choice.negatives, replace=False))
        places = places[: choice.negatives]
        rows.append((query, candidates[places].tolist()))
        positive_means.append(positives.mean())
        negative_means.append(cosines[places].mean())
        inverted += bool(cosines[places].max() > positives.min())
    means = _mean(positive_means), _mean(negative_means)
    return Mined(rows, candidate_count, dropped, means, reasons, inverted)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _limit(positive: float, choice: Choice) -> float:
    """Returns the highest cosine that a negative may have; `positive` is the lowest cosine of a relevant document."""
    return positive - choice.margin * (abs(positive) if choice.is_share else 1)


def write_negatives(
    path: epath.PathLike, search: Search, mined: Mined, choice: Choice, similarity: str = "cosine"
) -> Iterator[str]:
    """Writes a table with the columns anchor, positive, negative_1, ..., with a row for each relevant document.

    Args:
      path: the file.
      search: the queries and documents.
      mined: the result of `mine_negatives`.
      choice: the rules of `mine_negatives`.
      similarity: "cosine" or "dot".

    Yields:
      Lines to print.

    Raises:
      UserError: if no query has enough negatives.
    """
    path, queries, count = epath.Path(path), len(search.queries), 0
    noun = "cosine" if similarity == "cosine" else "dot product"
    named = {reason: reason.replace("cosine", noun) for reason in REMEDIES}
    reasons = "".join(f"; {number} were {named[reason]}" for reason, number in mined.dropped.items())
    looked_at = f"{mined.candidates} candidates have ranks from {choice.first} to {choice.last}{reasons}"
    ((reason, _),) = mined.reasons.most_common(1) or [("", 0)]
    remedy = REMEDIES.get(reason, MORE_DOCUMENTS)
    if not mined.rows:
        raise UserError(f"none of {queries} queries has {choice.negatives} negatives: {looked_at}; {remedy}")
    with replacing(path) as partial, partial.open("wb") as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        writer = TableWriter(path, text)
        for row in _table(search, mined.rows):
            writer.write(row, str(path))
            count += 1
    yield f"{choice.negatives} negatives for {len(mined.rows)} of {queries} queries: {count} rows in {path}"
    yield looked_at
    if fewer := queries - len(mined.rows):
        dropped = f"queries were dropped: they have fewer than {choice.negatives} negatives"
        cause = f"most of their dropped candidates were {named[reason]}" if reason else "there are too few documents"
        is_most = fewer > queries / 2
        yield f"warning: {fewer} of {queries} {dropped}, since {cause}; {remedy}" if is_most else f"{fewer} {dropped}"
    if mined.inverted:
        yield (
            f"warning: {mined.inverted} of {len(mined.rows)} queries have a negative that is nearer than their "
            f"positive. Such a negative may be relevant; --margin=0 excludes it. If --margin=0 drops most queries, "
            f"train the checkpoint longer before you mine with it"
        )
    yield f"mean {noun}s: " + "{:.3f} of positives, {:.3f} of negatives".format(*mined.cosines)


def _table(search: Search, rows: Sequence[tuple[int, list[int]]]) -> Iterator[dict[str, str]]:
    for query, negatives in rows:
        more = {f"negative_{i}": search.documents[number] for i, number in enumerate(negatives, 1)}
        for number in search.relevant[query]:
            yield {"anchor": search.queries[query], "positive": search.documents[number], **more}
