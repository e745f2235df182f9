"""Counts the words of a corpus exactly, and samples words to learn a vocabulary from.

Both need bounded memory. The result is a function of the corpus; it does not depend on the order of counting.
"""

import collections
import hashlib
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, NamedTuple

from bertjax.common.errors import UserError

PARTS = 64  # files; for 100 GB of text, a file has a few million words


class WordCounts:
    """Exact counts of words. If the words exceed the memory limit, the counts are written to files by word hash."""

    def __init__(self, folder: pathlib.Path, max_letters: int):
        """Creates empty counts.

        Args:
          folder: the folder for the files.
          max_letters: the maximum total letters of the words in memory.
        """
        self._folder, self._max_letters = folder, max_letters
        self._words: dict[str, int] = {}
        self._letters, self._on_disk = 0, False

    def add(self, words: Mapping[str, int]) -> None:
        """Adds counts. Raises `UserError` if a file cannot be written, such as on a full disk."""
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

    def _file(self, number: int, mode: str) -> IO[str]:
        return open(self._folder / f"words-{number:02d}", mode, encoding="utf-8", errors="surrogatepass", newline="\n")

    def parts(self) -> Iterator[dict[str, int]]:
        """Yields the counts of all words, each word once."""
        if not self._on_disk:
            yield self._words
            return
        self._write()
        for number in range(PARTS):
            words: collections.Counter[str] = collections.Counter()
            with self._file(number, "a+") as file:
                file.seek(0)
                for line in file:
                    count, _, word = line.rstrip("\n").partition(" ")
                    words[word] += int(count)
            yield words


class Sample(NamedTuple):
    """A sample of words with their counts.

    The sample has all words with a count of at least the threshold t. It has other words with probability count / t;
    their count is then t. Therefore sums of counts are unbiased.

    Attributes:
      words: the counts.
      total: the number of words of the corpus, with repetition.
      threshold: the threshold.
    """

    words: dict[str, int]
    total: int
    threshold: int


def sample_words(parts: Iterable[Mapping[str, int]], max_letters: int) -> Sample:
    """Returns a sample with at most `max_letters` letters in total.

    The threshold is the smallest power of two that gives such a sample. The sample depends only on the counts and the
    hashes of the words.

    Args:
      parts: the counts; a word is in one part only.
      max_letters: the maximum total letters of the sampled words.
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
    """Returns the words of a sample with this threshold."""
    return {
        word: count
        for word, count in words.items()
        if count >= threshold or count << 64 > threshold * int.from_bytes(_hash(word)[1:])
    }


def _hash(word: str) -> bytes:
    """Returns nine bytes: the first byte determines the file of a word, the other bytes are a random number."""
    return hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=9).digest()
