"""Cleans a corpus: removes documents without prose, duplicate documents, and lines of many documents."""

import collections
import dataclasses
import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bertjax.common.errors import UserError
from bertjax.common.sorting import gather, merge_until_few, write_run
from bertjax.data.corpus.corpus import in_groups
from bertjax.data.corpus.reading import Document
from bertjax.text.words import MARKS, UNSPACED

HASHED_CHARACTERS = 4_000_000  # characters hashed at a time
RANGE_BYTES = 64 << 20  # bytes of hashes compared at a time
ROW = np.dtype(np.int64)  # type of the position or the document hash that is stored with each hash
SHINGLE_WORDS = 5
WORD = re.compile(rf"[{UNSPACED}][{MARKS}]*|[^\s{UNSPACED}]+")
# MinHash detects two documents with a share s of common shingles with probability 1 - (1 - s**8)**16: 0.95 for s = 0.8,
# 0.06 for s = 0.5.
BANDS, BAND_HASHES = 16, 8


class Repeats(NamedTuple):
    """The repeated documents and lines of a corpus, which are removed.

    Attributes:
      duplicates: `[documents]`, ascending positions of documents with the text of an earlier document.
      near_duplicates: `[documents]`, ascending positions of documents that resemble an earlier document.
      lines: `[lines]`, ascending hashes of repeated lines.
    """

    duplicates: np.ndarray
    near_duplicates: np.ndarray
    lines: np.ndarray


NO_REPEATS = Repeats(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64))

# Counted changes, and their descriptions after a number.
CHANGES = {
    "bad_documents": "documents left out: not text (data.on_bad_document=skip)",
    "normalized_lines": "lines normalized to NFC",
    "short_documents": "documents left out: no words, or fewer than data.cleaning.min_words",
    "documents_of_symbols": "documents left out: the share of symbols exceeds data.cleaning.max_symbols",
    "duplicate_documents": "documents left out: duplicates of earlier documents",
    "near_duplicates": "documents left out: near-duplicates of earlier documents",
    "repeated_lines": "lines left out: in more than data.cleaning.max_line_documents documents",
}
LINE_CHANGES = ("normalized_lines", "repeated_lines")  # changes that count lines; other changes count documents


def describe_changes(counts: Mapping) -> str:
    """Returns the changes of a corpus, to append to a message about missing text."""
    return "".join(f"; {counts[change]:,} {text}" for change, text in CHANGES.items() if counts[change])


def text_hash(text: str, salt: bytes = b"") -> int:
    """Returns a 64-bit hash of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, salt=salt).digest(), "big")


def apply_rules(document: Document, rules: Mapping, counts: Counter) -> Document | None:
    """Applies the rules that need only one document.

    Args:
      document: the document.
      rules: `config.data.cleaning`.
      counts: the number of changes, which the function increases.

    Returns:
      The changed document; None if the rules remove the document.
    """
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
    """Returns the share of characters that are not letters, marks, digits or spaces."""
    characters: Counter[str] = Counter()
    for line in lines:
        characters.update(line)
    symbols = sum(n for c, n in characters.items() if unicodedata.category(c)[0] not in "LMNZ" and not c.isspace())
    return symbols / max(1, characters.total())


def without_repeats(
    document: Document, position: int, repeats: Repeats, rules: Mapping, counts: Counter
) -> Document | None:
    """Removes a repeated document, or the repeated lines of a document.

    Args:
      document: the document.
      position: the position of the document in the corpus.
      repeats: the repeats in the corpus.
      rules: `config.data.cleaning`.
      counts: the number of changes, which the function increases.

    Returns:
      The document without repeated lines; None if the document is repeated, or too short without these lines.
    """
    for change, positions in (
        ("duplicate_documents", repeats.duplicates),
        ("near_duplicates", repeats.near_duplicates),
    ):
        if _is_in(positions, np.int64(position)):
            counts[change] += 1
            return None
    if len(repeats.lines):
        repeated = _is_in(repeats.lines, np.array([text_hash(line) for line in document.lines], np.uint64))
        if repeated.any():
            counts["repeated_lines"] += int(repeated.sum())
            lines = [line for line, leave_out in zip(document.lines, repeated) if not leave_out]
            return _long_enough(dataclasses.replace(document, lines=lines), rules, counts)
    return document


def words_of_line(line: str) -> list[str]:
    """Splits a line at spaces; splits text of scripts without spaces into characters."""
    return WORD.findall(line)


def _long_enough(document: Document, rules: Mapping, counts: Counter) -> Document | None:
    if sum(len(words_of_line(line)) for line in document.lines) >= max(1, rules["min_words"]):
        return document
    counts["short_documents"] += 1
    return None


def _is_in(ascending: np.ndarray, values: Any) -> Any:
    if not len(ascending):
        return np.zeros(np.shape(values), bool)
    return ascending[np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)] == values


# To find repeats, hashes are sorted on disk, and compared range by range.


def needs_repeats(rules: Mapping) -> bool:
    """Returns whether the rules remove repeats."""
    return bool(rules["duplicate_documents"] or rules["near_duplicates"] or rules["max_line_documents"])


def in_chunks(documents: Iterable[tuple[int, Document]]) -> Iterator[list[tuple[int, list[str]]]]:
    """Returns lists of (position, lines) of documents with about `HASHED_CHARACTERS` in total."""
    lines = ((position, document.lines) for position, document in documents)
    return in_groups(lines, lambda numbered: sum(map(len, numbered[1])), HASHED_CHARACTERS)


def hashes_of(chunk: Sequence[tuple[int, list[str]]], rules: Mapping) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the hashes that the rules need.

    Args:
      chunk: (position, lines) of documents.
      rules: `config.data.cleaning`.

    Returns:
      {kind: (hashes, rows)}: "documents" and "bands" with the positions of the documents, "lines" with the hashes of
      the documents.
    """
    positions, texts = np.array([position for position, _ in chunk], np.int64), [lines for _, lines in chunk]
    keys = np.array([text_hash("\n".join(lines)) for lines in texts], np.uint64)
    hashes: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if rules["duplicate_documents"]:
        hashes["documents"] = keys, positions
    if rules["near_duplicates"]:
        hashes["bands"] = bands_of(texts).ravel(), np.repeat(positions, BANDS)
    if rules["max_line_documents"]:
        lines_of = [np.unique(np.array([text_hash(line) for line in lines], np.uint64)) for lines in texts]
        hashes["lines"] = np.concatenate(lines_of), np.repeat(keys, list(map(len, lines_of))).view(np.int64)
    return hashes


def bands_of(texts: Iterable[list[str]]) -> np.ndarray:
    """Returns MinHash bands of documents, `[documents, BANDS]`. Similar documents probably have an equal band."""
    try:
        import rensa
    except ImportError:
        raise UserError(
            "config.data.cleaning.near_duplicates = True needs rensa: pip install 'bertjax[near]'"
        ) from None
    shingles = []
    for lines in texts:
        words = [word for line in lines for word in words_of_line(line)]
        last = max(1, len(words) - SHINGLE_WORDS + 1)
        shingles.append([" ".join(words[i : i + SHINGLE_WORDS]) for i in range(last)])
    digests = np.array(rensa.RMinHash.digests_from_token_sets(shingles, BANDS * BAND_HASHES, 0), np.uint64)
    factors = np.random.default_rng(0).integers(2**64, size=(BANDS, BAND_HASHES), dtype=np.uint64) | np.uint64(1)
    return (digests.reshape(-1, BANDS, BAND_HASHES) * factors).sum(2)


def write_hashes(numbered: tuple[int, Sequence], folder: str, rules: Mapping) -> int:
    """Writes the hashes of a chunk of the corpus.

    Args:
      numbered: number of the chunk, and (position, lines) of its documents.
      folder: the folder for the files.
      rules: `config.data.cleaning`.

    Returns:
      The size of the hashes in bytes.
    """
    number, chunk = numbered
    size = 0
    for kind, (keys, rows) in hashes_of(chunk, rules).items():
        write_run(os.path.join(folder, f"{kind}-{number:08d}"), keys, [rows])
        size += keys.nbytes + rows.nbytes
    return size


def merge_hashes(folder: str, pool: Any, ahead: int) -> dict[str, list[str]]:
    """Merges the files of each kind of hashes into few files; returns {kind: paths}."""
    paths = collections.defaultdict(list)
    for path in sorted(entry.path for entry in os.scandir(folder)):
        paths[os.path.basename(path).partition("-")[0]].append(path)
    return {kind: merge_until_few(runs, ROW, pool, ahead) for kind, runs in paths.items()}


def repeats_in_range(index: int, count: int, paths: Mapping[str, Sequence[str]], rules: Mapping) -> Repeats:
    """Returns the repeats among the hashes in one range.

    Args:
      index: the number of the range.
      count: the number of ranges.
      paths: {kind: files of hashes}.
      rules: `config.data.cleaning`.
    """
    return repeats_among({kind: gather(runs, ROW, index, count) for kind, runs in paths.items()}, rules)


def repeats_among(hashes: Mapping[str, tuple[np.ndarray, np.ndarray]], rules: Mapping) -> Repeats:
    """Returns the repeats among hashes.

    Args:
      hashes: {kind: (hashes, rows)}, see `hashes_of`.
      rules: `config.data.cleaning`.
    """
    return Repeats(
        later_positions(*hashes["documents"]) if "documents" in hashes else NO_REPEATS.duplicates,
        later_positions(*hashes["bands"]) if "bands" in hashes else NO_REPEATS.near_duplicates,
        repeated_lines(*hashes["lines"], rules["max_line_documents"]) if "lines" in hashes else NO_REPEATS.lines,
    )


def later_positions(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns all positions of each key except the first position, ascending."""
    order = np.lexsort((positions, keys))
    keys, positions = keys[order], positions[order]
    return np.unique(positions[1:][keys[1:] == keys[:-1]])


def repeated_lines(keys: np.ndarray, documents: np.ndarray, most: int) -> np.ndarray:
    """Returns the hashes of lines in more than `most` documents. Copies of a document count once."""
    order = np.lexsort((documents, keys))
    keys, documents = keys[order], documents[order]
    is_copy = (keys[1:] == keys[:-1]) & (documents[1:] == documents[:-1])
    keys, counts = np.unique(keys[np.append(True, ~is_copy)[: len(keys)]], return_counts=True)
    return keys[counts > most]


def merge_repeats(parts: Iterable[Repeats]) -> Repeats:
    """Merges the repeats of several ranges."""
    return Repeats(*(np.unique(np.concatenate(arrays)) for arrays in zip(NO_REPEATS, *parts)))
