"""Counts the words of a corpus exactly, and keeps a part of them that a vocabulary can be learnt from.

Both take bounded memory, and the result is a function of the corpus alone, in whatever order and parts it is counted.
"""

import collections
import hashlib
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from bertjax.common.errors import UserError

PARTS = 64  # files; of 100 GB of text, one has some million words


class WordCounts:
    """Exact counts. Words of more than `max_letters` letters together go to files in `folder`, by their hash.

    Raises `UserError` if these cannot be written, such as on a full disk.
    """

    def __init__(self, folder: pathlib.Path, max_letters: int):
        self._folder, self._max_letters = folder, max_letters
        self._words: dict[str, int] = {}
        self._letters, self._on_disk = 0, False

    def add(self, words: Mapping[str, int]) -> None:
        known = self._words
        for word, count in words.items():
            if word in known:
                known[word] += count
            else:
                known[word] = count
                self._letters += len(word)
        if self._letters > self._max_letters:
            self._write()

    def _write(self) -> None:
        parts = collections.defaultdict(list)
        for word, count in self._words.items():
            parts[_hash(word)[0] % PARTS].append(f"{count} {word}\n")
        try:
            for number, lines in parts.items():
                with self._file(number, "a") as file:
                    file.writelines(lines)
        except OSError as error:
            raise UserError(f"{self._folder}: cannot be written ({error.strerror or error})") from None
        self._words, self._letters, self._on_disk = {}, 0, True

    def _file(self, number: int, mode: str):
        return open(self._folder / f"words-{number:02d}", mode, encoding="utf-8", errors="surrogatepass", newline="\n")

    def parts(self) -> Iterator[dict[str, int]]:
        """Yields the counts of all words, each word once."""
        if not self._on_disk:
            yield self._words
            return
        self._write()
        for number in range(PARTS):
            words = collections.Counter()
            with self._file(number, "a+") as file:
                file.seek(0)
                for line in file:
                    count, _, word = line.rstrip("\n").partition(" ")
                    words[word] += int(count)
            yield words


class Sample(NamedTuple):
    """Words with their counts; of those rarer than `threshold` a random part. `total`: words in all, with repetition.

    Each word rarer than the threshold t is kept with probability count / t, and then counts as t: so every count, and
    every sum of counts, is right on average, and the others are exact.
    """

    words: dict[str, int]
    total: int
    threshold: int


def sample(parts: Iterable[Mapping[str, int]], max_letters: int) -> Sample:
    """Keeps words of at most `max_letters` letters together, with the smallest power of two as threshold.

    Whether a word is kept depends on nothing but its count and its hash.
    """
    kept: dict[str, int] = {}
    letters = total = 0
    threshold = 1
    for part in parts:
        total += sum(part.values())
        more = _frequent(part, threshold)
        kept.update(more)
        letters += sum(map(len, more))
        while letters > max_letters:
            threshold *= 2
            kept = _frequent(kept, threshold)
            letters = sum(map(len, kept))
    return Sample({word: max(count, threshold) for word, count in kept.items()}, total, threshold)


def _frequent(words: Mapping[str, int], threshold: int) -> dict[str, int]:
    return {
        word: count
        for word, count in words.items()
        if count >= threshold or count << 64 > threshold * int.from_bytes(_hash(word)[1:])
    }


def _hash(word: str) -> bytes:
    """Nine bytes: the first one chooses the file, the others are the word's random number."""
    return hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=9).digest()
