"""Learns pieces that a vocabulary lacks: those of the words of a text which it cuts into many.

It goes on where byte-pair encoding stops (Sennrich et al. 2016, section 3.2): words are cut as the vocabulary cuts
them, and the two pieces that most often follow each other within a word are joined to a new one, again and again.
"""

import collections
import heapq
import itertools
from collections.abc import Collection, Mapping

from bertjax.common.errors import UserError
from bertjax.text.tokenizers.interface import Joined, Tokenizer

LEAST_COUNT = 2  # occurrences of a new piece, as of the pieces of a new vocabulary


def extended(tokenizer: Tokenizer, words: Mapping[str, int], pieces: int) -> Tokenizer:
    """Returns a tokenizer with so many more pieces, which have the ids after the others. Text without them keeps its
    ids.

    Args:
      words: the result of `vocabulary_learning.count_words`, whose order does not matter.

    Raises `UserError` if the words do not yield that many pieces, or the tokenizer cannot have more.
    """
    left_out, lost = set(), True
    while lost:
        larger = tokenizer.extended(learn(tokenizer, words, pieces, left_out))
        lost = [word for word in words if _is_unknown(larger, word) and not _is_unknown(tokenizer, word)]
        left_out |= {
            piece for piece in larger.pieces[tokenizer.vocab_size :] if any(piece.strip("#") in word for word in lost)
        }
    if (found := larger.vocab_size - tokenizer.vocab_size) < pieces:
        raise UserError(
            f"config.tokenizer.extend = {pieces}: this corpus gives {found} new pieces; set it to that or less, or add "
            f"text"
        )
    return larger


def _is_unknown(tokenizer: Tokenizer, word: str) -> bool:
    return tokenizer.unk_id in tokenizer.encode(word).ids


def learn(tokenizer: Tokenizer, words: Mapping[str, int], most: int, left_out: Collection[str] = ()) -> list[Joined]:
    """Returns what is joined, in the order in which it is learnt: `most` new pieces, or as many as there are.

    A piece of which hardly anything is left, since it became a part of others, is left out if the tokenizer does not
    need it to make these. A piece that the tokenizer has is not joined, though a text may cut it up: its ids would be
    others.
    """
    counts = collections.Counter()
    for word in sorted(words):
        for unit in tokenizer.units(word):
            counts[tuple(unit)] += words[word]
    units, new, found = _Units(counts, tokenizer.join, {*tokenizer.pieces, *left_out}), set(), []

    def is_used(piece: str) -> bool:
        return tokenizer.keeps_parts or units.occurs[piece] >= LEAST_COUNT

    while (len(new) < most or sum(map(is_used, new)) < most) and (best := units.most_frequent()) is not None:
        found.append(Joined(units.merge(*best), *best))
        new.add(found[-1].piece)
    return [each for each in found if is_used(each.piece)]


class _Units:
    """The words of a text, cut into pieces, and how often each pair of pieces follow each other."""

    def __init__(self, counts: Mapping[tuple[str, ...], int], join, left_out: Collection[str]):
        self._join, self._left_out = join, left_out
        self._units = [list(unit) for unit in counts]
        self._counts = list(counts.values())
        self._pairs: collections.Counter = collections.Counter()
        self._places: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
        self.occurs: collections.Counter = collections.Counter()  # how often a piece occurs
        for number in range(len(self._units)):
            self._count(number, 1)
        self._heap = [(-count, pair) for pair, count in self._pairs.items()]
        heapq.heapify(self._heap)

    def most_frequent(self) -> tuple[str, str] | None:
        """Returns the most frequent pair, of equal ones the first by its letters; None if none occurs often enough."""
        while self._heap:
            count, pair = self._heap[0]
            now = self._pairs.get(pair, 0)
            if self._join(*pair) in self._left_out:
                heapq.heappop(self._heap)
                continue
            if now == -count:
                return pair if now >= LEAST_COUNT else None
            heapq.heappop(self._heap)  # it has become rarer since
            if now:
                heapq.heappush(self._heap, (-now, pair))
        return None

    def merge(self, left: str, right: str) -> str:
        """Joins a pair wherever it occurs; returns the piece."""
        piece, changed = self._join(left, right), set()
        for number in sorted(self._places.pop((left, right))):
            changed |= self._count(number, -1)
            unit, joined = self._units[number], []
            for each in unit:
                if joined and joined[-1] == left and each == right:
                    joined[-1] = piece
                else:
                    joined.append(each)
            self._units[number] = joined
            changed |= self._count(number, 1)
        for pair in changed:
            if count := self._pairs[pair]:
                heapq.heappush(self._heap, (-count, pair))
        return piece

    def _count(self, number: int, sign: int) -> set[tuple[str, str]]:
        """Adds the pairs of a unit, or takes them away; returns them."""
        unit, count = self._units[number], sign * self._counts[number]
        pairs = list(itertools.pairwise(unit))
        for piece in unit:
            self.occurs[piece] += count
        for pair in pairs:
            self._pairs[pair] += count
            if sign > 0:
                self._places[pair].add(number)
            else:
                self._places[pair].discard(number)
        return set(pairs)
