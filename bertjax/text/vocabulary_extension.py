"""Learns tokens that a vocabulary lacks, from words that the vocabulary splits into many tokens.

This continues byte-pair encoding (Sennrich et al. 2016, section 3.2) with an existing vocabulary: the tokenizer splits
words into tokens, and the most frequent pair of consecutive tokens within a word becomes a new token, repeatedly.
"""

import collections
import heapq
import itertools
from collections.abc import Callable, Collection, Mapping

from bertjax.common.errors import UserError
from bertjax.text.tokenizers.interface import Joined, Tokenizer

LEAST_COUNT = 2  # occurrences of a new token, as of the tokens of a new vocabulary


def extended(tokenizer: Tokenizer, words: Mapping[str, int], tokens: int) -> Tokenizer:
    """Returns a tokenizer with new tokens after the old tokens. Text without new tokens keeps its ids.

    Args:
      tokenizer: the tokenizer to extend.
      words: the result of `vocabulary_learning.count_words`. The order does not matter.
      tokens: the number of new tokens.

    Raises:
      UserError: the words do not yield `tokens` new tokens, or the tokenizer cannot have more.
    """
    left_out: set[str] = set()
    while True:
        larger = tokenizer.extended(learn_joined(tokenizer, words, tokens, left_out))
        lost = [word for word in words if _is_unknown(larger, word) and not _is_unknown(tokenizer, word)]
        if not lost:
            break
        new = larger.pieces[tokenizer.vocab_size :]
        left_out |= {token for token in new if any(token.strip("#") in word for word in lost)}
    if (count := larger.vocab_size - tokenizer.vocab_size) < tokens:
        raise UserError(
            f"config.tokenizer.extend = {tokens}: this corpus gives {count} new tokens; set "
            f"--config.tokenizer.extend={count} or less, or add text"
        )
    return larger


def _is_unknown(tokenizer: Tokenizer, word: str) -> bool:
    return tokenizer.unk_id in tokenizer.encode(word).ids


def learn_joined(
    tokenizer: Tokenizer, words: Mapping[str, int], most: int, left_out: Collection[str] = ()
) -> list[Joined]:
    """Returns the pairs to join, in the order of learning: `most` new tokens, or all possible tokens.

    Omits a new token whose occurrences became parts of longer tokens, unless the tokenizer needs it to form these. Does
    not join a pair to a token of the tokenizer, even if a text splits that token, because its ids would change.

    Args:
      tokenizer: the tokenizer to extend.
      words: {word: its count}.
      most: the number of new tokens.
      left_out: new tokens that are not learned.
    """
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    for word in sorted(words):
        for unit in tokenizer.units(word):
            counts[tuple(unit)] += words[word]
    units = _Units(counts, tokenizer.join, {*tokenizer.pieces, *left_out})
    new: set[str] = set()
    joined: list[Joined] = []

    def is_used(token: str) -> bool:
        return tokenizer.keeps_parts or units.occurrences[token] >= LEAST_COUNT

    while (len(new) < most or sum(map(is_used, new)) < most) and (best := units.most_frequent()) is not None:
        joined.append(Joined(units.merge(*best), *best))
        new.add(joined[-1].token)
    return [pair for pair in joined if is_used(pair.token)]


class _Units:
    """The units of words as lists of tokens, and the counts of pairs of consecutive tokens.

    Attributes:
      occurrences: {token: its count}.
    """

    def __init__(
        self, counts: Mapping[tuple[str, ...], int], join: Callable[[str, str], str], left_out: Collection[str]
    ):
        self._join, self._left_out = join, left_out
        self._units = [list(unit) for unit in counts]
        self._counts = list(counts.values())
        self._pairs: collections.Counter[tuple[str, str]] = collections.Counter()
        self._units_with: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
        self.occurrences: collections.Counter[str] = collections.Counter()
        for number in range(len(self._units)):
            self._count(number, 1)
        self._heap = [(-count, pair) for pair, count in self._pairs.items()]
        heapq.heapify(self._heap)

    def most_frequent(self) -> tuple[str, str] | None:
        """Returns the most frequent pair, the alphabetically first for ties; None if no pair is frequent enough."""
        while self._heap:
            count, pair = self._heap[0]
            current = self._pairs.get(pair, 0)
            is_left_out = self._join(*pair) in self._left_out
            if current == -count and not is_left_out:
                return pair if current >= LEAST_COUNT else None
            heapq.heappop(self._heap)
            if current and not is_left_out:  # the pair has become less frequent
                heapq.heappush(self._heap, (-current, pair))
        return None

    def merge(self, left: str, right: str) -> str:
        """Joins all occurrences of a pair; returns the new token."""
        new, changed = self._join(left, right), set()
        for number in sorted(self._units_with.pop((left, right))):
            changed |= self._count(number, -1)
            unit: list[str] = []
            for token in self._units[number]:
                if unit and unit[-1] == left and token == right:
                    unit[-1] = new
                else:
                    unit.append(token)
            self._units[number] = unit
            changed |= self._count(number, 1)
        for pair in changed:
            if count := self._pairs[pair]:
                heapq.heappush(self._heap, (-count, pair))
        return new

    def _count(self, number: int, sign: int) -> set[tuple[str, str]]:
        """Adds (sign 1) or subtracts (sign -1) the counts of a unit; returns the pairs of the unit."""
        unit, count = self._units[number], sign * self._counts[number]
        for token in unit:
            self.occurrences[token] += count
        pairs = list(itertools.pairwise(unit))
        for pair in pairs:
            self._pairs[pair] += count
            (self._units_with[pair].add if sign > 0 else self._units_with[pair].discard)(number)
        return set(pairs)
