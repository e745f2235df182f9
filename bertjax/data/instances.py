"""Makes the segment pairs of next-sentence prediction (Google's create_pretraining_data.py)."""

import bisect
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Tokens(NamedTuple):
    """The tokens of some documents: sentence i is `ids[starts[i] : starts[i + 1]]`, and never empty.

    Attributes:
      ids: `[tokens]`.
      starts: `[sentences + 1]`, also the end of the last sentence.
      documents: `[documents + 1]`: document i has the sentences `documents[i] : documents[i + 1]`, at least one.
    """

    ids: np.ndarray
    starts: list[int]
    documents: list[int]


def as_tokens(ids: np.ndarray, sizes: np.ndarray, sentences: Sequence[int]) -> Tokens:
    """Leaves out sentences without tokens, and documents without sentences.

    Args:
      ids: `[tokens]` of all sentences, one after the other.
      sizes: tokens of each sentence.
      sentences: number of sentences of each document.
    """
    document = np.repeat(np.arange(len(sentences)), sentences)[sizes > 0]
    counts = np.bincount(document, minlength=1)
    starts, documents = np.cumsum(sizes[sizes > 0]), np.cumsum(counts[counts > 0])
    return Tokens(ids, [0, *starts.tolist()], [0, *documents.tolist()])


class Pair(NamedTuple):
    """Segments A and B, of at least one token each; with [CLS] and two [SEP] they fit the sequence length.

    A segment is `size` of the tokens, from `start` on.
    """

    first_start: int
    first_size: int
    second_start: int
    second_size: int
    is_random_next: bool


def make_pairs(
    tokens: Tokens, index: int, rng: random.Random, *, length: int, short_seq_prob: float = 0.1
) -> Iterator[Pair]:
    """Yields segment pairs that cover document `index`, as Google's create_instances_from_document does.

    Gathers sentences until they fill a sequence of `length` tokens, then splits them at a random sentence boundary.
    With probability 0.5, and always if there is only one sentence, takes B from a random position in another document
    instead; the sentences that this frees go into the next pair. There must be at least two documents.
    """
    _, starts, documents = tokens
    max_tokens = length - 3
    target = 2 + _below(rng, max_tokens - 1) if rng.random() < short_seq_prob else max_tokens

    sentence, last = documents[index], documents[index + 1]
    while sentence < last:
        begin = starts[sentence]
        end = min(last, bisect.bisect_left(starts, begin + target, sentence + 1))
        split = sentence + (1 + _below(rng, end - sentence - 1) if end - sentence > 1 else 1)
        first_size = starts[split] - begin
        is_random_next = end - sentence == 1 or rng.random() < 0.5
        if is_random_next:
            other = _below(rng, len(documents) - 2)
            other += other >= index
            start, stop = _random_segment(starts, documents[other], documents[other + 1], target - first_size, rng)
            end = split
        else:
            start, stop = starts[split], starts[end]
        keep_first, keep_second = _truncate(first_size, stop - start, max_tokens)
        yield Pair(
            begin + _cut_in_front(first_size - keep_first, rng),
            keep_first,
            start + _cut_in_front(stop - start - keep_second, rng),
            keep_second,
            is_random_next,
        )
        sentence = end


def _below(rng: random.Random, limit: int) -> int:
    """A random number from 0 to limit - 1; `rng.randrange` takes five times as long."""
    return int(rng.random() * limit)


def _random_segment(starts: list[int], first: int, last: int, target: int, rng: random.Random) -> tuple[int, int]:
    """Sentences of a document, from a random one on, until there are `target` tokens; at least one sentence."""
    sentence = first + _below(rng, last - first)
    end = min(last, bisect.bisect_left(starts, starts[sentence] + max(target, 1), sentence + 1))
    return starts[sentence], starts[end]


def _truncate(first: int, second: int, max_tokens: int) -> tuple[int, int]:
    """The sizes that remain if the longer segment always loses a token, B if both are equal (truncate_seq_pair)."""
    excess = max(0, first + second - max_tokens)
    difference = first - second
    lead = min(excess, abs(difference))
    first -= lead if difference > 0 else 0
    second -= lead if difference < 0 else 0
    return first - (excess - lead) // 2, second - (excess - lead + 1) // 2


def _cut_in_front(excess: int, rng: random.Random) -> int:
    """How many of the tokens that are removed are the first ones: each is, or is not, with probability 0.5."""
    return rng.getrandbits(excess).bit_count() if excess else 0
