"""Hard negatives: documents that are near a query and are not relevant to it, to learn vectors from."""

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

REMEDIES = {  # by the reason for which a document is no negative
    "nearer than the margin allows": "lower --margin, or raise --last",
    "above the highest cosine": "raise --max_score or --last",
    "below the lowest cosine": "lower --min_score",
}
MARGIN, MOST, LEAST = REMEDIES
MORE_DOCUMENTS = "name more documents with --corpus, or lower --negatives or --first"


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which documents become the negatives of a query.

    Args:
      negatives: how many.
      first, last: the ranks that they may have, from 1, among the documents that are not relevant to it.
      margin: how far their cosines must at least be below that of each document that is relevant to it.
      is_share: whether `margin` is a share of that cosine.
      least, most: the cosines that they may have.
      seed: decides the draw among those that are left; None: the nearest ones are taken.
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
      rows: (the number of a query, those of its negatives, the nearest one first) of each query that has enough.
      candidates: how many documents have one of the ranks.
      dropped: how many of these cannot be taken, by reason.
      cosines: the mean cosines of the queries to their relevant documents, and to their negatives; NaN: there are none.
      reasons: as `dropped`, of the queries that have too few negatives.
      inverted: how many queries have a negative that is nearer than a relevant document.
    """

    rows: list[tuple[int, list[int]]]
    candidates: int
    dropped: Counter
    cosines: tuple[float, float]
    reasons: Counter
    inverted: int


def mine(
    search: Search, queries: np.ndarray, documents: np.ndarray, choice: Choice, similarity: str = "cosine"
) -> Mined:
    """Finds negatives for the queries of a search, each text of which occurs once, with the vectors that are given.

    A document with the text or the id of the query is never one. With the `similarity` dot, all cosines are dot
    products.
    """
    relevant = [set(found) for found in search.relevant]
    numbers = {document: number for number, document in enumerate(search.documents)}
    identical = search.identical or [-1] * len(search.queries)
    same = ({numbers.get(query, -1), number} - {-1} for query, number in zip(search.queries, identical))
    not_it = [each | more for each, more in zip(relevant, same)]
    most = max(map(len, not_it))
    with Bar("comparing", [len(queries) * len(documents)], " pairs") as bar:
        found = nearest(queries, documents, choice.last + most, similarity, bar)
    rows, candidates_of_all, dropped, near, far = [], 0, Counter(), [], []
    reasons, inverted = Counter(), 0
    for query, (found_numbers, cosines) in enumerate(zip(*found)):
        is_other = [number not in not_it[query] for number in found_numbers.tolist()]
        ranks = slice(choice.first - 1, choice.last)
        candidates, cosines = found_numbers[is_other][ranks], cosines[is_other][ranks]
        own = comparable(documents[list(relevant[query])], similarity) @ comparable(queries[query], similarity)
        limits = {
            MARGIN: cosines <= _limit(own.min(), choice),
            MOST: cosines <= choice.most,
            LEAST: cosines >= choice.least,
        }
        candidates_of_all += len(candidates)
        is_left, dropped_here = np.ones(len(candidates), bool), Counter()
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
        near.append(own.mean())
        far.append(cosines[places].mean())
        inverted += bool(cosines[places].max() > own.min())
    means = tuple(float(np.mean(side)) if side else float("nan") for side in (near, far))
    return Mined(rows, candidates_of_all, dropped, means, reasons, inverted)


def _limit(positive: float, choice: Choice) -> float:
    """Returns the highest cosine of a negative where that of the least near relevant document is `positive`."""
    return positive - choice.margin * (abs(positive) if choice.is_share else 1)


def write(
    path: epath.PathLike, search: Search, mined: Mined, choice: Choice, similarity: str = "cosine"
) -> Iterator[str]:
    """Writes a table with the columns anchor, positive, negative_1, ...: a row for each document that is relevant to a
    query. Yields lines to print. Raises `UserError` if there is no row.
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
        why = f"most of their dropped candidates were {named[reason]}" if reason else "there are too few documents"
        is_most = fewer > queries / 2
        yield f"warning: {fewer} of {queries} {dropped}, since {why}; {remedy}" if is_most else f"{fewer} {dropped}"
    if mined.inverted:
        yield (
            f"warning: {mined.inverted} of {len(mined.rows)} queries have a negative that is nearer than their "
            f"positive, and may be relevant; --margin=0 leaves them out. If few are left, train the "
            f"checkpoint longer before you mine with it"
        )
    yield f"mean {noun}s: " + "{:.3f} of positives, {:.3f} of negatives".format(*mined.cosines)


def _table(search: Search, rows: Sequence[tuple[int, list[int]]]) -> Iterator[dict[str, str]]:
    for query, negatives in rows:
        more = {f"negative_{i}": search.documents[number] for i, number in enumerate(negatives, 1)}
        for number in search.relevant[query]:
            yield {"anchor": search.queries[query], "positive": search.documents[number], **more}
