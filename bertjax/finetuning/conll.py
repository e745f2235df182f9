"""Reads sentences with tagged words: CoNLL files, and CoNLL-2003 from TensorFlow Datasets."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from etils import epath

from bertjax.common.errors import UserError
from bertjax.data.corpus.tables import cell, missing_file, read_text, read_tfds
from bertjax.finetuning import metrics

DOCUMENT = "-DOCSTART-"
FILES = {"train": ("eng.train", "train.txt", "train.conll"), "dev": ("eng.testa", "dev.txt", "valid.txt", "dev.conll")}


@dataclasses.dataclass(frozen=True)
class Sentence:
    """A sentence of tagged words.

    Attributes:
      words: the words.
      tags: the tag of each word; tags of entities are BIO.
      document: the index of the document.
      where: FILE:LINE of each word, for messages.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    document: int
    where: tuple[str, ...] = ()


def find_conll_file(folder: str, name: str) -> epath.Path:
    """Returns the file of a split. Raises `UserError` if there is none."""
    for file in FILES[name]:
        if (path := epath.Path(folder) / file).exists():
            return path
    raise missing_file(folder, " or ".join(FILES[name]))


def read_conll(path: epath.PathLike) -> list[Sentence]:
    """Reads a CoNLL file: a word per line, with the tag (IOB1 or BIO) in the last column.

    Blank lines separate sentences, and -DOCSTART- lines separate documents. Without such lines, each sentence is a
    document.

    Raises:
      UserError: for an invalid line: file, line and the expected value.
    """
    lines = read_text(path).split("\n")
    split = _split_at_tabs if _is_split_at_tabs(lines) else _split_at_spaces
    sentences: list[Sentence] = []
    rows: list[tuple[str, str, str]] = []  # word, tag and FILE:LINE of the words of a sentence
    document = columns = 0

    def close() -> None:
        if rows:
            words, tags, where = zip(*rows)
            sentences.append(Sentence(words, to_bio(tags), document, where))
        rows.clear()

    for number, line in enumerate(lines, 1):
        cells, where = split(line), f"{path}:{number}"
        if not cells or cells[0] == DOCUMENT:
            close()
            document += bool(cells)
            continue
        _check_cells(cells, columns, line, where)
        columns = columns or len(cells)
        rows.append((cells[0], cells[-1], where))
    close()
    if not sentences:
        raise UserError(f"{path}: has no sentence; add at least one")
    check_words(sentences, "the first column", may_be_one=columns < 3)
    if not document:
        return [dataclasses.replace(sentence, document=index) for index, sentence in enumerate(sentences)]
    return sentences


def _check_cells(cells: Sequence[str], columns: int, line: str, where: str) -> None:
    """Raises `UserError` for the cells of an invalid line; `columns` is 0 for the first line with cells."""
    if cells[0].startswith("#") and (len(cells) != (columns or max(2, len(cells))) or not is_bio(cells[-1])):
        raise UserError(f"{where}: a comment, {line.strip()[:60]!r}; remove lines that begin with #")
    columns = columns or len(cells)
    if len(cells) != columns or columns < 2:
        expected = f"{columns} as in earlier lines" if columns > 1 else "at least 2: a word and a tag"
        raise UserError(f"{where}: {len(cells)} columns, expected {expected}")
    if not is_bio(cells[-1]):
        raise UserError(f"{where}: the tag is {cells[-1]!r}, expected O, B-type or I-type")


def _split_at_spaces(line: str) -> list[str]:
    cells = line.strip(" \t\r").replace("\t", " ").split(" ")  # `split()` would also split at other whitespace.
    return [cell for cell in cells if cell]


def _split_at_tabs(line: str) -> list[str]:
    return [cell for cell in map(str.strip, line.split("\t")) if cell]


def _is_split_at_tabs(lines: Sequence[str]) -> bool:
    """Returns whether only tabs separate columns, so that words contain spaces."""
    spaces, tabs = (
        Counter(len(cells) for line in lines if (cells := split(line)) and cells[0] != DOCUMENT and cells[0][0] != "#")
        for split in (_split_at_spaces, _split_at_tabs)
    )
    return len(tabs) == 1 < len(spaces) and max(tabs) > 1 and spaces.most_common(1)[0][0] == max(tabs)


def check_words(sentences: Sequence[Sentence], column: str, may_be_one: bool = True) -> None:
    """Raises `UserError` if a column of words contains numbers instead, or the same name in each row.

    Args:
      sentences: the sentences.
      column: the description of the column for the message.
      may_be_one: whether all words can be equal.
    """
    words = {word for sentence in sentences for word in sentence.words}
    is_name = not may_be_one and len(words) == 1 < sum(len(sentence.words) for sentence in sentences)
    if all(map(_is_count, words)) or is_name:
        raise UserError(f"{sentences[0].where[0]}: {column} has {', '.join(sorted(words)[:3])} instead of words")


def _is_count(word: str) -> bool:
    return re.fullmatch(r"\d+([-.]\d+)?", word) is not None  # CoNLL-U also numbers words as 1-2 and 8.1.


def read_tfds_conll(path: str, split: str) -> list[Sentence]:
    """Reads the sentences of "tfds:conll2003". Each sentence is a document, because the dataset has no boundaries."""
    sentences = []
    for index, row in enumerate(read_tfds(path, split)):
        words, tags = (cell(row, name) for name in ("tokens", "ner"))
        if wrong := [tag for tag in tags if not is_bio(tag)]:
            raise UserError(f"{row.where}: the tag is {wrong[0]!r}, expected O, B-type or I-type")
        sentences.append(Sentence(tuple(words), to_bio(tags), index, (row.where,) * len(words)))
    return sentences


def is_bio(tag: str) -> bool:
    """Returns whether a tag is O, B-type or I-type."""
    kind, _, type_ = tag.partition("-")
    return tag == "O" or (kind in ("B", "I") and bool(type_))


def to_bio(tags: Sequence[str]) -> tuple[str, ...]:
    """Converts IOB1 or BIO to BIO, in which each entity starts with B."""
    out = ["O"] * len(tags)
    for type_, first, end in metrics.entities(tags):
        out[first:end] = [f"B-{type_}", *[f"I-{type_}"] * (end - first - 1)]
    return tuple(out)


def tag_names(sentences: Sequence[Sentence]) -> tuple[str, ...]:
    """Returns O, then B and I of each entity type."""
    types = sorted({tag[2:] for sentence in sentences for tag in sentence.tags if tag != "O"})
    return ("O", *(f"{kind}-{type_}" for type_ in types for kind in "BI"))
