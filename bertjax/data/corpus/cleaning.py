"""Cleans a corpus: leaves out documents that are hardly text, duplicates, and lines that many documents repeat."""

import collections
import dataclasses
import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.common.sorting import gather, merge_until_few, write_run
from bertjax.data.corpus.reading import Document
from bertjax.text.words import MARKS, UNSPACED

HASHED_CHARACTERS = 4_000_000  # characters hashed at a time
RANGE_BYTES = 64 << 20  # bytes of hashes that are compared at a time
ROW = np.dtype(np.int64)  # what comes with each hash
SHINGLE_WORDS = 5
WORD = re.compile(rf"[{UNSPACED}][{MARKS}]*|[^\s{UNSPACED}]+")
# MinHash: two documents with a share s of shingles in common are found with probability 1 - (1 - s**8)**16, which is
# 0.95 for s = 0.8 and 0.06 for s = 0.5.
BANDS, BAND_HASHES = 16, 8


class Repeats(NamedTuple):
    """What repeats in a corpus and is left out.

    Attributes:
      duplicates: `[documents]`, ascending positions of documents with the text of an earlier one.
      near_duplicates: `[documents]`, ascending positions of documents that resemble an earlier one.
      lines: `[lines]`, ascending hashes.
    """

    duplicates: np.ndarray
    near_duplicates: np.ndarray
    lines: np.ndarray


NONE = Repeats(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64))


CHANGES = {  # changes that are counted
    "bad_documents": "documents left out, which are no text (data.on_bad_document=skip)",
    "normalized_lines": "lines normalized to NFC",
    "short_documents": "documents left out, of no words, or of fewer than data.cleaning.min_words",
    "documents_of_symbols": "documents left out, with a larger share of symbols than data.cleaning.max_symbols",
    "duplicate_documents": "documents left out, with the text of an earlier one",
    "near_duplicates": "documents left out, which resemble an earlier one",
    "repeated_lines": "lines left out, which more than data.cleaning.max_line_documents documents have",
}
LINES = ("normalized_lines", "repeated_lines")  # the changes that count lines; others count documents


def describe(counts: Mapping) -> str:
    """What was left out, for a message about what is missing."""
    return "".join(f"; {counts[what]:,} {text}" for what, text in CHANGES.items() if counts[what])


def text_hash(text: str, salt: bytes = b"") -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, salt=salt).digest(), "big")


def cleaned(document: Document, rules: Mapping, counts: Counter) -> Document | None:
    """Applies the rules of `config.data.cleaning` that need no other document; None if it is left out."""
    if rules["nfc"]:
        lines = [unicodedata.normalize("NFC", line) for line in document.lines]
        counts["normalized_lines"] += sum(map(str.__ne__, lines, document.lines))
        document = dataclasses.replace(document, lines=lines)
    if rules["min_words"] and not _long_enough(document, rules, counts):
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


def without_repeats(
    document: Document, position: int, repeats: Repeats, rules: Mapping, counts: Counter
) -> Document | None:
    """Leaves out a document that is not to be used, and the lines that too many documents have.

    `position` is that of the document in the corpus; `counts` is increased by what is left out.
    """
    for what, positions in (("duplicate_documents", repeats.duplicates), ("near_duplicates", repeats.near_duplicates)):
        if _is_in(positions, np.int64(position)):
            counts[what] += 1
            return None
    if len(repeats.lines):
        repeated = _is_in(repeats.lines, np.array([text_hash(line) for line in document.lines], np.uint64))
        if repeated.any():
            counts["repeated_lines"] += int(repeated.sum())
            lines = [line for line, leave_out in zip(document.lines, repeated) if not leave_out]
            return _long_enough(dataclasses.replace(document, lines=lines), rules, counts)
    return document


def words_of(line: str) -> list[str]:
    """Splits a line at spaces, and into characters where a script has no spaces between words."""
    return WORD.findall(line)


def _long_enough(document: Document, rules: Mapping, counts: Counter) -> Document | None:
    if sum(len(words_of(line)) for line in document.lines) >= max(1, rules["min_words"]):
        return document
    counts["short_documents"] += 1
    return None


def _is_in(ascending: np.ndarray, values):
    if not len(ascending):
        return np.zeros(np.shape(values), bool)
    return ascending[np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)] == values


# How repeats are found: hashes are written to disk in their order, and compared range by range.


def looks_for_repeats(rules: Mapping) -> bool:
    return bool(rules["duplicate_documents"] or rules["near_duplicates"] or rules["max_line_documents"])


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


def hashes_of(piece: Sequence[tuple[int, list[str]]], rules: Mapping) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns what the rules need: hashes of documents, of their bands, and of their lines.

    With the hash of a document or of a band comes its position, with that of a line the hash of its document.
    """
    positions, texts = np.array([position for position, _ in piece], np.int64), [lines for _, lines in piece]
    keys, found = np.array([text_hash("\n".join(lines)) for lines in texts], np.uint64), {}
    if rules["duplicate_documents"]:
        found["documents"] = keys, positions
    if rules["near_duplicates"]:
        found["bands"] = bands_of(texts).ravel(), np.repeat(positions, BANDS)
    if rules["max_line_documents"]:
        lines = [np.unique(np.array([text_hash(line) for line in lines], np.uint64)) for lines in texts]
        found["lines"] = np.concatenate(lines), np.repeat(keys, [len(each) for each in lines]).view(np.int64)
    return found


def bands_of(texts: Iterable[list[str]]) -> np.ndarray:
    """`[documents, BANDS]` hashes; two documents have one in common with the probability that `BANDS` tells."""
    try:
        import rensa
    except ImportError:
        raise UserError(
            "config.data.cleaning.near_duplicates = True needs rensa: pip install 'bertjax[near]'"
        ) from None
    shingles = []
    for lines in texts:
        words = [word for line in lines for word in words_of(line)]
        last = max(1, len(words) - SHINGLE_WORDS + 1)
        shingles.append([" ".join(words[i : i + SHINGLE_WORDS]) for i in range(last)])
    digests = np.array(rensa.RMinHash.digests_from_token_sets(shingles, BANDS * BAND_HASHES, 0), np.uint64)
    factors = np.random.default_rng(0).integers(2**64, size=(BANDS, BAND_HASHES), dtype=np.uint64) | np.uint64(1)
    return (digests.reshape(-1, BANDS, BAND_HASHES) * factors).sum(2)


def write_hashes(numbered: tuple[int, Sequence], folder: str, rules: Mapping) -> int:
    """Writes the hashes of a piece of the corpus; returns their size in bytes."""
    number, piece = numbered
    size = 0
    for kind, (keys, rows) in hashes_of(piece, rules).items():
        write_run(os.path.join(folder, f"{kind}-{number:08d}"), keys, [rows])
        size += keys.nbytes + rows.nbytes
    return size


def merge_hashes(folder: str, pool, ahead: int) -> dict[str, list[str]]:
    """Merges the files of each kind of hashes into few; returns their paths."""
    paths = collections.defaultdict(list)
    for path in sorted(entry.path for entry in os.scandir(folder)):
        paths[os.path.basename(path).partition("-")[0]].append(path)
    return {kind: merge_until_few(found, ROW, pool, ahead) for kind, found in paths.items()}


def repeats_in_range(index: int, count: int, paths: Mapping[str, Sequence[str]], rules: Mapping) -> Repeats:
    """Returns what repeats, of the hashes in range `index` of `count`; `paths` of each kind of hashes."""
    return repeats_among(lambda kind: gather(paths.get(kind, ()), ROW, index, count), rules)


def repeats_among(hashes: Callable[[str], tuple[np.ndarray, np.ndarray]], rules: Mapping) -> Repeats:
    """Returns what repeats; `hashes` gives those of "documents", "bands" and "lines", see `hashes_of`."""
    found = NONE
    if rules["duplicate_documents"]:
        found = found._replace(duplicates=later_ones(*hashes("documents")))
    if rules["near_duplicates"]:
        found = found._replace(near_duplicates=later_ones(*hashes("bands")))
    if rules["max_line_documents"]:
        found = found._replace(lines=repeated_lines(*hashes("lines"), rules["max_line_documents"]))
    return found


def later_ones(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """All positions of each key but the first."""
    order = np.lexsort((positions, keys))
    keys, positions = keys[order], positions[order]
    return np.unique(positions[1:][keys[1:] == keys[:-1]])


def repeated_lines(keys: np.ndarray, documents: np.ndarray, most: int) -> np.ndarray:
    """Lines in more than `most` documents; copies of a document count once."""
    order = np.lexsort((documents, keys))
    keys, documents = keys[order], documents[order]
    is_copy = (keys[1:] == keys[:-1]) & (documents[1:] == documents[:-1])
    keys, counts = np.unique(keys[np.append(True, ~is_copy)[: len(keys)]], return_counts=True)
    return keys[counts > most]


def joined(parts: Sequence[Repeats]) -> Repeats:
    """Joins the repeats of several ranges."""
    return Repeats(*(np.unique(np.concatenate(arrays)) for arrays in zip(NONE, *parts)))
