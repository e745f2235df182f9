"""Makes the segment pairs of next-sentence prediction (Google's create_pretraining_data.py)."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Sentence = Sequence[int]


class Pair(NamedTuple):
    """Segments A and B, of at least one token each; with [CLS] and two [SEP] they fit the sequence length."""

    first: list[int]
    second: list[int]
    is_random_next: bool


def make_pairs(
    documents: Sequence[Sequence[Sentence]],
    index: int,
    rng: np.random.Generator,
    *,
    length: int,
    short_seq_prob: float = 0.1,
) -> Iterator[Pair]:
    """Yields segment pairs that cover `documents[index]`, as Google's create_instances_from_document does.

    Gathers sentences until they fill a sequence of `length` tokens, then splits them at a random sentence boundary.
    With probability 0.5, and always if there is only one sentence, takes B from a random position in another document
    instead; the sentences that this frees go into the next pair. `documents` holds at least two documents, and no
    empty sentences.
    """
    document = documents[index]
    max_tokens = length - 3
    target = int(rng.integers(2, max_tokens + 1)) if rng.random() < short_seq_prob else max_tokens

    start = 0
    while start < len(document):
        end, gathered = start, 0
        while end < len(document) and gathered < target:
            gathered += len(document[end])
            end += 1
        split = start + (int(rng.integers(1, end - start)) if end - start > 1 else 1)
        first = _join(document[start:split])
        is_random_next = end - start == 1 or rng.random() < 0.5
        if is_random_next:
            other = int(rng.integers(len(documents) - 1))
            second = _random_segment(documents[other + (other >= index)], target - len(first), rng)
            end = split
        else:
            second = _join(document[split:end])
        yield Pair(*_truncate(first, second, max_tokens, rng), is_random_next)
        start = end


def _random_segment(document: Sequence[Sentence], target: int, rng) -> list[int]:
    """Joins sentences, starting at a random one, until there are `target` tokens; at least one sentence."""
    segment = []
    for sentence in document[int(rng.integers(len(document))) :]:
        segment.extend(sentence)
        if len(segment) >= target:
            break
    return segment


def _truncate(first: list[int], second: list[int], max_tokens: int, rng) -> tuple[list[int], list[int]]:
    """Removes tokens from the longer segment, each from front or back at random (Google's truncate_seq_pair)."""
    excess = max(0, len(first) + len(second) - max_tokens)
    keep_first, keep_second = len(first), len(second)
    # The longer segment loses tokens until both are equally long; then they alternate, B first.
    difference = keep_first - keep_second
    lead = min(excess, abs(difference))
    keep_first -= lead if difference > 0 else 0
    keep_second -= lead if difference < 0 else 0
    keep_second -= (excess - lead + 1) // 2
    keep_first -= (excess - lead) // 2
    return _cut(first, keep_first, rng), _cut(second, keep_second, rng)


def _cut(segment: list[int], keep: int, rng) -> list[int]:
    if keep == len(segment):
        return segment
    front = int(rng.binomial(len(segment) - keep, 0.5))  # tokens removed from the front
    return segment[front : front + keep]


def _join(sentences: Sequence[Sentence]) -> list[int]:
    return [token for sentence in sentences for token in sentence]
