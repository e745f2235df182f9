"""Hard negatives for the training of embeddings: documents that are similar but not relevant to a query."""

import dataclasses
import functools
import io
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import replacing
from bertjax.common.progress import Bar
from bertjax.data.corpus.tables import TableWriter
from bertjax.embedding.neighbors import nearest_of_block, query_blocks
from bertjax.embedding.retrieval import Search
from bertjax.embedding.work_folder import WorkFolder
from bertjax.finetuning.metrics import comparable

REMEDIES = {  # {reason to reject a candidate: fix}
    "nearer than the margin allows": "lower --margin, or raise --last",
    "above the highest allowed cosine": "raise --max_score or --last",
    "below the lowest allowed cosine": "lower --min_score",
}
MARGIN, MOST, LEAST = REMEDIES
MORE_DOCUMENTS = "name more documents with --corpus, or lower --negatives or --first"
NOUNS = {"cosine": "cosine", "dot": "dot product"}  # {similarity: the name of a score}
RERANKED = "reranker's score"
RERANKED_QUERIES = 64  # queries whose candidates are reranked together


class PairScorer(Protocol):
    """Scores pairs of a query and a document, as `reranking.ranking.Ranker`."""

    def scores(self, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
        """Returns the score of each pair, `[pairs]` float32; a relevant document has a higher score."""
        ...

    def identity(self) -> str:
        """Returns a hash of the values that determine the scores."""
        ...


@dataclasses.dataclass(frozen=True)
class Choice:
    """The rules that choose the negatives of a query. Candidates are the documents that are not relevant to the query.

    A score is the cosine of a query and a document, the dot product, or the score of a reranker.

    Attributes:
      negatives: the number of negatives.
      first: the rank of the nearest allowed candidate; 1 is the nearest of all candidates.
      last: the rank of the farthest allowed candidate.
      margin: the minimum difference between the score of each relevant document and the score of a negative.
      is_share: whether `margin` is a share of the score of the relevant document.
      least: the lowest allowed score of a negative.
      most: the highest allowed score.
      seed: the seed of a random choice among the allowed candidates; None chooses the candidates with the highest
        scores.
    """

    negatives: int = 1
    first: int = 1
    last: int = 100
    margin: float = -np.inf
    is_share: bool = False
    least: float = -np.inf
    most: float = np.inf
    seed: int | None = None

    @property
    def has_limits(self) -> bool:
        """Whether the choice compares the score of a candidate."""
        return self.margin > -np.inf or self.least > -np.inf or self.most < np.inf


class Scored(NamedTuple):
    """Documents of a query with their scores.

    Attributes:
      numbers: the indices in `Search.documents` of candidates or of negatives, by falling score, or by cosine or dot
        product if a reranker replaced the scores of chosen negatives.
      scores: their scores.
      positives: the scores of the relevant documents, in the order of `Search.relevant`.
    """

    numbers: np.ndarray
    scores: np.ndarray
    positives: np.ndarray


class Mined(NamedTuple):
    """The negatives of a search.

    Attributes:
      rows: (index of the query, indices of its negatives in the order of `Scored`) of each query with enough negatives.
      candidates: the number of candidates with an allowed rank, summed over all queries.
      dropped: the number of rejected candidates by reason.
      cosines: the mean score of the relevant documents, and of the negatives, over the queries in `rows`, which have
        equal weights; NaN without negatives.
      reasons: like `dropped`, but only for the queries with too few negatives.
      inverted: the number of queries with a negative that has a higher score than a relevant document.
      noun: the name of the scores in `cosines`, which the limits compare: cosine, dot product or reranker's score.
      scored: the negatives of each of `rows` with their scores.
    """

    rows: list[tuple[int, list[int]]]
    candidates: int
    dropped: Counter[str]
    cosines: tuple[float, float]
    reasons: Counter[str]
    inverted: int
    noun: str
    scored: list[Scored]


def mine_negatives(
    search: Search,
    queries: np.ndarray,
    documents: np.ndarray,
    choice: Choice,
    similarity: str = "cosine",
    reranker: PairScorer | None = None,
    folder: WorkFolder | None = None,
    identity: Sequence[str] = (),
) -> Mined:
    """Returns hard negatives for queries. A negative never has the text or the id of its query.

    Apart from the texts and the result, the memory does not grow with the number of queries and documents, if the
    embeddings are mapped into memory.

    Args:
      search: the queries and documents; each text occurs once.
      queries: the embeddings of the queries, `[queries, width]`.
      documents: the embeddings of the documents, `[documents, width]`.
      choice: the rules.
      similarity: "cosine", or "dot" to use dot products in place of all cosines.
      reranker: scores the candidates with ranks from `first` to `last`, which are ranks by cosine or dot product. If
        the choice has limits, the limits compare these scores, and the negatives are the candidates with the highest of
        these scores. Without limits, cosines or dot products choose the negatives, and the reranker only replaces the
        scores of the relevant documents and of the negatives in `Mined.scored`.
      folder: keeps finished parts; None keeps nothing.
      identity: hashes that determine the search and the embeddings, for the names of the parts.
    """
    candidates = _nearest_candidates(search, queries, documents, choice, similarity, folder, identity)
    noun = NOUNS[similarity]
    if reranker is not None and choice.has_limits:
        noun = RERANKED
        candidates = _reranked(search, candidates, reranker, folder, identity)
    candidate_count, inverted = 0, 0
    chosen: list[tuple[int, Scored]] = []
    dropped: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for query, scored in candidates:
        candidate_count += len(scored.numbers)
        places, dropped_here = _allowed(scored, choice)
        dropped += dropped_here
        if len(places) < choice.negatives:
            reasons += dropped_here
            continue
        if choice.seed is not None:
            random = np.random.default_rng([choice.seed, query])
            places = np.sort(random.choice(places, choice.negatives, replace=False))
        places = places[: choice.negatives]
        negatives = Scored(scored.numbers[places], scored.scores[places], scored.positives)
        chosen.append((query, negatives))
        inverted += bool(negatives.scores.max() > negatives.positives.min())
    means = (
        _mean([negatives.positives.mean() for _, negatives in chosen]),
        _mean([negatives.scores.mean() for _, negatives in chosen]),
    )
    rows = [(query, negatives.numbers.tolist()) for query, negatives in chosen]
    if reranker is not None and noun != RERANKED:
        chosen = list(_reranked(search, iter(chosen), reranker, folder, identity, is_sorted=False))
    scored_rows = [negatives for _, negatives in chosen]
    return Mined(rows, candidate_count, dropped, means, reasons, inverted, noun, scored_rows)


def _nearest_candidates(
    search: Search,
    queries: np.ndarray,
    documents: np.ndarray,
    choice: Choice,
    similarity: str,
    folder: WorkFolder | None,
    identity: Sequence[str],
) -> Iterator[tuple[int, Scored]]:
    """Yields each query with the candidates whose ranks are allowed."""
    excluded = _excluded_documents(search)
    count = choice.last + max(map(len, excluded))
    with Bar("comparing", [len(queries) * len(documents)], " pairs") as bar:
        for rows in query_blocks(len(queries)):
            compute = functools.partial(nearest_of_block, queries[rows], documents, count, similarity, bar)
            inputs = [*identity, similarity, count, rows.start, rows.stop]
            neighbours = folder.arrays("neighbours", inputs, compute) if folder else compute()
            for query, (numbers, cosines) in enumerate(zip(*neighbours), rows.start):
                is_candidate = [number not in excluded[query] for number in numbers.tolist()]
                ranks = slice(choice.first - 1, choice.last)
                relevant = comparable(documents[list(search.relevant[query])], similarity)
                positives = relevant @ comparable(queries[query], similarity)
                yield query, Scored(numbers[is_candidate][ranks], cosines[is_candidate][ranks], positives)


def _excluded_documents(search: Search) -> list[set[int]]:
    """Returns for each query the documents that are never negatives: relevant ones, and the query's text and id."""
    texts = set(search.queries)
    numbers = {document: number for number, document in enumerate(search.documents) if document in texts}
    identical = search.identical or [-1] * len(search.queries)
    return [
        {*relevant, numbers.get(query, -1), number} - {-1}
        for query, relevant, number in zip(search.queries, search.relevant, identical)
    ]


def _reranked(
    search: Search,
    candidates: Iterator[tuple[int, Scored]],
    reranker: PairScorer,
    folder: WorkFolder | None,
    identity: Sequence[str],
    is_sorted: bool = True,
) -> Iterator[tuple[int, Scored]]:
    """Yields candidates with the scores of a reranker, by falling scores, or in the same order."""
    hashes = [*identity, reranker.identity()] if folder else []
    with Bar("reranking", [len(search.queries)], " queries") as bar:
        while portion := list(itertools.islice(candidates, RERANKED_QUERIES)):
            numbers = [[*search.relevant[query], *scored.numbers.tolist()] for query, scored in portion]
            pairs = [
                (search.queries[query], search.documents[number])
                for (query, _), numbers_of_query in zip(portion, numbers)
                for number in numbers_of_query
            ]
            compute = functools.partial(_scores_of_pairs, reranker, pairs)
            inputs = [*hashes, portion[0][0], numbers]
            (scores,) = folder.arrays("reranked", inputs, compute) if folder else compute()
            bounds = np.cumsum([len(numbers_of_query) for numbers_of_query in numbers])[:-1]
            for (query, scored), scores_of_query in zip(portion, np.split(scores, bounds)):
                positives, negatives = np.split(scores_of_query, [len(search.relevant[query])])
                order = np.argsort(-negatives, kind="stable") if is_sorted else np.arange(len(negatives))
                yield query, Scored(scored.numbers[order], negatives[order], positives)
            bar.update(len(portion))


def _scores_of_pairs(reranker: PairScorer, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray]:
    return (reranker.scores(pairs),)


def _allowed(scored: Scored, choice: Choice) -> tuple[np.ndarray, Counter[str]]:
    """Returns the places of the candidates within the limits, and the numbers of the rejected ones by reason."""
    limits = {
        MARGIN: scored.scores <= _limit(scored.positives.min(), choice),
        MOST: scored.scores <= choice.most,
        LEAST: scored.scores >= choice.least,
    }
    is_left = np.ones(len(scored.numbers), bool)
    dropped: Counter[str] = Counter()
    for reason, fits in limits.items():
        dropped[reason] = int((is_left & ~fits).sum())
        is_left &= fits
    return np.flatnonzero(is_left), dropped


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _limit(positive: float, choice: Choice) -> float:
    """Returns the highest score that a negative may have; `positive` is the lowest score of a relevant document."""
    return positive - choice.margin * (abs(positive) if choice.is_share else 1)


def write_negatives(
    path: epath.PathLike, search: Search, mined: Mined, choice: Choice, with_scores: bool = False
) -> Iterator[str]:
    """Writes a table with the columns anchor, positive, negative_1, ..., with a row for each relevant document.

    Args:
      path: the file.
      search: the queries and documents.
      mined: the result of `mine_negatives`.
      choice: the rules of `mine_negatives`.
      with_scores: whether to write the columns score_positive, score_negative_1, ... as well.

    Yields:
      Lines to print.

    Raises:
      UserError: if no query has enough negatives.
    """
    path, queries, count = epath.Path(path), len(search.queries), 0
    named = {reason: reason.replace("cosine", mined.noun) for reason in REMEDIES}
    reasons = "".join(f"; {number} were {named[reason]}" for reason, number in mined.dropped.items())
    looked_at = f"{mined.candidates} candidates have ranks from {choice.first} to {choice.last}{reasons}"
    ((reason, _),) = mined.reasons.most_common(1) or [("", 0)]
    remedy = REMEDIES.get(reason, MORE_DOCUMENTS)
    if not mined.rows:
        raise UserError(f"none of {queries} queries has {choice.negatives} negatives: {looked_at}; {remedy}")
    with replacing(path) as partial, partial.open("wb") as file, io.TextIOWrapper(file, "utf-8", newline="") as text:
        writer = TableWriter(path, text)
        for row in _table(search, mined, with_scores):
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
            f"warning: {mined.inverted} of {len(mined.rows)} queries have a negative with a higher score than "
            f"their positive. Such a negative may be relevant; --margin=0 excludes it. If --margin=0 drops most "
            f"queries, train the checkpoint longer before you mine with it"
        )
    yield f"mean {mined.noun}s: " + "{:.3f} of positives, {:.3f} of negatives".format(*mined.cosines)


def _table(search: Search, mined: Mined, with_scores: bool) -> Iterator[dict[str, str | float]]:
    for (query, negatives), scored in zip(mined.rows, mined.scored):
        texts = {f"negative_{i}": search.documents[number] for i, number in enumerate(negatives, 1)}
        scores = {f"score_negative_{i}": _as_number(score) for i, score in enumerate(scored.scores, 1)}
        for number, score in zip(search.relevant[query], scored.positives):
            row: dict[str, str | float] = {
                "anchor": search.queries[query],
                "positive": search.documents[number],
                **texts,
            }
            yield row | {"score_positive": _as_number(score), **scores} if with_scores else row


def _as_number(score: np.float32) -> float:
    """Returns the shortest decimal number that rounds to a score in float32."""
    return float(str(score))
