"""Run files of TREC: the ranked documents of queries, one line `QUERY Q0 DOCUMENT RANK SCORE TAG` for each document."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from etils import epath

from bertjax.common.errors import UserError
from bertjax.data.corpus import fingerprints
from bertjax.data.corpus.tables import lines_with_ends

COLUMNS = "QUERY Q0 DOCUMENT RANK SCORE TAG"


def read_run(path: epath.PathLike) -> dict[str, list[str]]:
    """Reads a run file.

    Returns:
      For each query, the ids of its documents in descending order of their scores. Documents with equal scores keep the
      order of the file.

    Raises:
      UserError: if the file is missing or empty, or for a wrong line: file, line and expected columns.
    """
    path = epath.Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file; correct the path")
    scores: dict[str, dict[str, float]] = {}
    for number, line in enumerate(lines_with_ends(path), 1):
        if not (cells := line.split()):
            continue
        where = f"{path}:{number}"
        if len(cells) != 6:
            raise UserError(f"{where}: {len(cells)} columns, expected 6: {COLUMNS}")
        query, _, document, _, score, _ = cells
        documents = scores.setdefault(query, {})
        if document in documents:
            raise UserError(f"{where}: the query {query!r} has the document {document!r} twice; remove one line")
        try:
            documents[document] = float(score)
        except ValueError:
            raise UserError(f"{where}: the score is {score!r}, expected a number") from None
        if not math.isfinite(documents[document]):
            raise UserError(f"{where}: the score is {score!r}, expected a finite number")
    if not scores:
        raise UserError(f"{path}: has no line; expected lines of {COLUMNS}")
    fingerprints.add_file(path)
    return {query: sorted(documents, key=lambda name: -documents[name]) for query, documents in scores.items()}


def run_lines(rankings: Mapping[str, Sequence[tuple[str, float]]], tag: str = "bertjax") -> Iterator[str]:
    """Yields the lines of a run file.

    Args:
      rankings: for each query, its documents with their scores, the highest score first.
      tag: the name of the system, in the last column. Scores have nine digits, which identify a float32 number.

    Raises:
      UserError: if an id has a space, or if a query has a document twice.
    """
    for query, documents in rankings.items():
        names = [name for name, _ in documents]
        require_ids([query, *names])
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise UserError(f"the query {query!r} has the document {twice!r} twice; give each document its own id")
        for rank, (document, score) in enumerate(documents, 1):
            yield f"{query} Q0 {document} {rank} {score:.9g} {tag}\n"


def require_ids(ids: Iterable[str], where: str = "") -> None:
    """Raises `UserError` for an id that a run file cannot contain; the message begins with `where`."""
    if (wrong := next((name for name in ids if len(name.split()) != 1), None)) is not None:
        raise UserError(f"{where}the id {wrong!r} has a space, or is empty; a run file needs ids without spaces")


def check_ids(known: Iterable[str], ids: Iterable[str], path: epath.PathLike, file: epath.PathLike, kind: str) -> None:
    """Raises `UserError` if a run file has an id that another file lacks.

    Args:
      known: the ids of the other file.
      ids: the ids of the run file.
      path: the run file.
      file: the other file.
      kind: "query" or "document".
    """
    names = set(known)
    if (missing := next((name for name in ids if name not in names), None)) is not None:
        raise UserError(f"{path}: the {kind} {missing!r} is not in {file}; add the {kind}, or correct its id")
