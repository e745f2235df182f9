"""Cleans a corpus: leaves out documents that are hardly text, duplicates, and lines that many documents repeat."""

import dataclasses
import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.data.runs import gather, write_run
from bertjax.text.documents import Document

HASHED_CHARACTERS = 4_000_000  # at a time
RANGE_BYTES = 64 << 20  # of hashes that are compared at a time


class Repeats(NamedTuple):
    """What repeats in a corpus.

    Attributes:
      documents: `[repeated documents]`, ascending hashes of their texts.
      first: `[repeated documents]`, the position of the first one in the corpus.
      lines: `[repeated lines]`, ascending hashes.
    """

    documents: np.ndarray
    first: np.ndarray
    lines: np.ndarray


NONE = Repeats(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.uint64))


CHANGES = {  # that are counted
    "normalized_lines": "lines normalized to NFC",
    "short_documents": "documents left out, of fewer words than data.cleaning.min_words",
    "documents_of_symbols": "documents left out, with a larger share of symbols than data.cleaning.max_symbols",
    "duplicate_documents": "documents left out, with the text of an earlier one",
    "repeated_lines": "lines left out, which more than data.cleaning.max_line_documents documents have",
}


def text_hash(text: str, salt: bytes = b"") -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, salt=salt).digest(), "big")


def cleaned(document: Document, rules: Mapping, counts: Counter) -> Document | None:
    """Applies the rules of `config.data.cleaning` that need no other document; None if it is left out."""
    if rules["nfc"]:
        lines = [unicodedata.normalize("NFC", line) for line in document.lines]
        counts["normalized_lines"] += sum(map(str.__ne__, lines, document.lines))
        document = dataclasses.replace(document, lines=lines)
    if rules["min_words"] and sum(len(line.split()) for line in document.lines) < rules["min_words"]:
        counts["short_documents"] += 1
        return None
    if rules["max_symbols"] < 1 and _symbols(document.lines) > rules["max_symbols"]:
        counts["documents_of_symbols"] += 1
        return None
    return document


def _symbols(lines: Sequence[str]) -> float:
    """The share of characters that are neither letters, marks, digits nor spaces."""
    characters = Counter()
    for line in lines:
        characters.update(line)
    symbols = sum(n for c, n in characters.items() if unicodedata.category(c)[0] not in "LMNZ" and not c.isspace())
    return symbols / max(1, characters.total())


def without_repeats(document: Document, position: int, repeats: Repeats, counts: Counter) -> Document | None:
    """Leaves out a document if an earlier one has its text, and the lines that too many documents have.

    `position` is that of the document in the corpus; `counts` is increased by what is left out.
    """
    if len(repeats.documents):
        key = text_hash("\n".join(document.lines))
        place = int(_find(repeats.documents, key))
        if repeats.documents[place] == key and repeats.first[place] != position:
            counts["duplicate_documents"] += 1
            return None
    if len(repeats.lines):
        keys = np.array([text_hash(line) for line in document.lines], np.uint64)
        repeated = repeats.lines[_find(repeats.lines, keys)] == keys
        if repeated.any():
            counts["repeated_lines"] += int(repeated.sum())
            lines = [line for line, leave_out in zip(document.lines, repeated) if not leave_out]
            return dataclasses.replace(document, lines=lines) if lines else None
    return document


def _find(ascending: np.ndarray, keys) -> np.ndarray:
    return np.minimum(np.searchsorted(ascending, np.asarray(keys, np.uint64)), len(ascending) - 1)


# How repeats are found: hashes are written to disk in their order, and compared range by range.


def in_pieces(documents: Iterable[tuple[int, Document]]) -> Iterator[list[tuple[int, list[str]]]]:
    """Yields (position, lines) of documents, as many at a time as have `HASHED_CHARACTERS`."""
    piece, characters = [], 0
    for position, document in documents:
        piece.append((position, document.lines))
        characters += sum(map(len, document.lines))
        if characters >= HASHED_CHARACTERS:
            yield piece
            piece, characters = [], 0
    if piece:
        yield piece


def hashes_of(piece: Sequence[tuple[int, list[str]]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the hash and the position of each document, and the hash of each line with that of its document."""
    keys = np.array([text_hash("\n".join(lines)) for _, lines in piece], np.uint64)
    lines = [np.unique(np.array([text_hash(line) for line in lines], np.uint64)) for _, lines in piece]
    return {
        "documents": (keys, np.array([position for position, _ in piece], np.int64)),
        "lines": (np.concatenate(lines), np.repeat(keys, [len(each) for each in lines]).view(np.int64)),
    }


def write_hashes(numbered: tuple[int, Sequence], folder: str) -> int:
    """Writes the hashes of a piece of the corpus; returns their size in bytes."""
    number, piece = numbered
    size = 0
    for kind, (keys, rows) in hashes_of(piece).items():
        write_run(os.path.join(folder, f"{kind}-{number:08d}"), keys, [rows])
        size += keys.nbytes + rows.nbytes
    return size


def repeats_in_range(index: int, count: int, folder: str, rules: Mapping) -> Repeats:
    """Returns what repeats, of the hashes in range `index` of `count`."""

    def hashes(kind):
        paths = sorted(path.path for path in os.scandir(folder) if path.name.startswith(kind))
        return gather(paths, np.dtype(np.int64), index, count)

    return repeats_among(hashes, rules)


def repeats_among(hashes: Callable[[str], tuple[np.ndarray, np.ndarray]], rules: Mapping) -> Repeats:
    """Returns what repeats; `hashes` gives those of "documents" with positions, and of "lines" with documents."""
    found = NONE
    if rules["duplicate_documents"]:
        found = found._replace(**repeated_documents(*hashes("documents")))
    if rules["max_line_documents"]:
        found = found._replace(lines=repeated_lines(*hashes("lines"), rules["max_line_documents"]))
    return found


def repeated_documents(keys: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
    order = np.lexsort((positions, keys))
    keys, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
    return dict(documents=keys[counts > 1], first=positions[order][first[counts > 1]])


def repeated_lines(keys: np.ndarray, documents: np.ndarray, most: int) -> np.ndarray:
    """Lines in more than `most` documents; copies of a document count once."""
    order = np.lexsort((documents, keys))
    keys, documents = keys[order], documents[order]
    is_copy = (keys[1:] == keys[:-1]) & (documents[1:] == documents[:-1])
    keys, counts = np.unique(keys[np.append(True, ~is_copy)[: len(keys)]], return_counts=True)
    return keys[counts > most]


def joined(parts: Sequence[Repeats]) -> Repeats:
    """Joins the repeats of ascending ranges."""
    return Repeats(*(np.concatenate(arrays) for arrays in zip(NONE, *parts)))
