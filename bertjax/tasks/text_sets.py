"""Sets of texts that belong together, or do not: what vectors are learnt from, and judged by.

A set has one of the `FORMS`. It is a file, or the train or dev file of a folder.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from bertjax.config import UserError
from bertjax.data.batches.examples import Examples
from bertjax.data.documents.tables import SUFFIXES, Row, column, find_table, read_table, read_text
from bertjax.lists import split_at_commas
from bertjax.tasks import squad
from bertjax.tasks.pairs import encode_pairs
from bertjax.tasks.targets import Number
from bertjax.text.tokenizer import Tokenizer

QUERY, DOCUMENT = "query", "document"


class TextSet(NamedTuple):
    """The examples of a set.

    Attributes:
      texts: of each example; all have as many.
      values: the score or the label of each example; None: the first two texts belong together, others do not.
    """

    texts: Sequence[tuple[str, ...]]
    values: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Form:
    """What the examples of a set are.

    Args:
      read: (file, columns of the texts, column of the label) -> the set. Raises `UserError` with file and line for what
        is no example.
      suffixes: of its files.
      is_search: whether the first text is a query, and the others are documents; prompts differ.
      values: type of the scores or labels of a set; None: it has none.
    """

    read: Callable[[epath.Path, Sequence[str], str], TextSet]
    suffixes: tuple[str, ...] = SUFFIXES
    is_search: bool = False
    values: type | None = None


def _read_pairs(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    del label
    if len(texts) < 2:
        raise UserError(f"config.data.texts = {texts[0]!r}: pairs need two columns or more: query, positive, negatives")
    return TextSet([_texts(row, texts) for row in read_table(path)[0]])


def _read_scored(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    rows, _ = read_table(path)
    scores = np.array([Number().value(row, label) for row in rows], np.float32)
    if (scores == scores[0]).all():
        raise UserError(f"{path}: all scores, in column {label!r}, are {scores[0]:g}; nothing can be learnt from them")
    return TextSet([_texts(row, _two(texts, "scored pairs")) for row in rows], scores)


def _read_labelled(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    rows, _ = read_table(path)
    labels = []
    for row in rows:
        if (value := Number().value(row, label)) not in (0, 1):
            raise UserError(
                f"{row.where}: {label} is {value:g}, expected 1 or 0: whether the texts belong together; degrees of it "
                f"are form=scored"
            )
        labels.append(int(value))
    return TextSet([_texts(row, _two(texts, "labelled pairs")) for row in rows], np.array(labels, np.int32))


def _read_sentences(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    del label
    if path.suffix == ".txt":
        found = [line.strip() for line in read_text(path).splitlines()]
    else:
        found = [_texts(row, texts[:1])[0] for row in read_table(path)[0]]
    found = [(text, text) for text in found if text]
    if not found:
        raise UserError(f"{path}: no text in it")
    return TextSet(found)


def _read_squad(path: epath.Path, texts: Sequence[str], label: str) -> TextSet:
    del texts, label
    return TextSet([(asked.text, asked.context) for asked in squad.read(path) if asked.answers])


def _two(texts: Sequence[str], what: str) -> Sequence[str]:
    if len(texts) != 2:
        raise UserError(f"config.data.texts = {','.join(texts)!r}: {what} have two texts; name their two columns")
    return texts


def _texts(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the texts of a row. Raises `UserError` if one is empty."""
    found = tuple(column(row, name).strip() for name in names)
    for name, text in zip(names, found):
        if not text:
            raise UserError(f"{row.where}: {name} is empty; each example needs all of its {len(names)} texts")
    return found


FORMS = {
    "pairs": Form(_read_pairs, is_search=True),
    "scored": Form(_read_scored, values=np.float32),
    "labelled": Form(_read_labelled, values=np.int32),
    "sentences": Form(_read_sentences, (".txt", *SUFFIXES)),
    "squad": Form(_read_squad, (".json",), is_search=True),
}


def read(given, part: str) -> TextSet:
    """Reads the set of a section of the config, with fields as `config.data` has them.

    Args:
      part: train or dev: which file of a folder.

    Raises `UserError` for a missing or invalid file.
    """
    columns = tuple(map(str.strip, split_at_commas(given.texts)))
    return FORMS[given.form].read(_find(given.path, part, given.form), columns, given.label)


def shape_of(given) -> tuple[int, type | None]:
    """Returns how many texts the examples of such a set have, and the type of their values, if they have any."""
    return max(2, len(split_at_commas(given.texts))), FORMS[given.form].values


def _find(path: str, part: str, form: str) -> epath.Path:
    place, suffixes = epath.Path(path), FORMS[form].suffixes
    if not place.is_dir():
        if not place.is_file():
            raise UserError(f"config.data.path = {path!r}: no such file or folder")
        if place.suffix not in suffixes:
            raise UserError(f"{path}: form={form} is read from {', '.join(suffixes)}")
        return place
    if form == "squad":
        names = [f"{part}-{version}.json" for version in ("v1.1", "v2.0")]
        found = [place / name for name in names if (place / name).exists()]
        if len(found) != 1:
            raise UserError(
                f"config.data.path = {path!r}: {'both' if found else 'neither'} {' and '.join(names)} in it"
            )
        return found[0]
    if ".txt" in suffixes and (text := place / f"{part}.txt").exists():
        return text
    return find_table(path, part)


class Encoded(NamedTuple):
    """Texts as ids.

    Attributes:
      examples: each is one text, and each text occurs once.
      numbers: `[examples of the set, texts]`: which of these each text of the set is.
      cut: how many were truncated.
    """

    examples: Examples
    numbers: np.ndarray
    cut: int


def encode(found: TextSet, form: str, prompts: dict[str, str], tokenizer: Tokenizer, max_seq_length: int) -> Encoded:
    """Encodes the texts of a set, each with its prompt before it: of queries, and of what is no search, that of
    `QUERY`; of documents that of `DOCUMENT`."""
    kinds = (QUERY, DOCUMENT) if FORMS[form].is_search else (QUERY, QUERY)
    numbers: dict[str, int] = {}

    def number(texts: Iterable[str]) -> list[int]:
        return [numbers.setdefault(prompts[kinds[i > 0]] + text, len(numbers)) for i, text in enumerate(texts)]

    which = np.array([number(texts) for texts in found.texts], np.int32)
    input_ids, token_types, cut = encode_pairs(tokenizer, list(numbers), None, max_seq_length)
    return Encoded(Examples(input_ids, token_types), which, sum(cut))


def training_examples(encoded: Encoded, values: np.ndarray | None) -> Examples:
    """Returns examples of several texts each. Their labels are the values or, without, numbers of their texts: of equal
    texts the same."""
    which = encoded.numbers
    input_ids, token_types = (
        [arrays[i] for i in which.ravel()] for arrays in (encoded.examples.input_ids, encoded.examples.token_types)
    )
    return Examples(input_ids, token_types, which if values is None else values, choices=which.shape[1])
