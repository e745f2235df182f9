"""Makes the sequences of pre-training from documents: segment pairs (Google's create_pretraining_data.py), segments in
order or swapped (ALBERT), or full sentences (RoBERTa)."""

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


def of_documents(tokens: Tokens, documents: np.ndarray) -> Tokens:
    """Returns the tokens of some documents, given as ascending indices."""
    sizes, counts = np.diff(tokens.starts), np.diff(tokens.documents)
    used = np.repeat(np.isin(np.arange(len(counts)), documents), counts)
    return as_tokens(tokens.ids[np.repeat(used, sizes)], sizes[used], counts[documents])


def separated(tokens: Tokens, sep_id: int) -> Tokens:
    """Adds [SEP] at the end of each document, to its last sentence."""
    starts, documents = np.array(tokens.starts), np.array(tokens.documents)
    ids = np.insert(tokens.ids, starts[documents[1:]], sep_id)
    return Tokens(
        ids, (starts + np.searchsorted(documents[1:], np.arange(len(starts)), "right")).tolist(), tokens.documents
    )


class Instance(NamedTuple):
    """Segments A and B, of at least one token each; with [CLS] and two [SEP] they fit the sequence length.

    A segment is `size` of the tokens, from `start` on. Without a B, whose size is 0 then, there is but one [SEP].
    """

    first_start: int
    first_size: int
    second_start: int
    second_size: int
    label: int  # 1 if B is a random segment, or if the segments are swapped


def make_instances(
    tokens: Tokens,
    documents: Sequence[int],
    next_sentence: str,
    rng: random.Random,
    *,
    length: int,
    short_seq_prob: float = 0.1,
) -> Iterator[Instance]:
    """Yields the sequences of some documents: pairs | order | none, for which the tokens must be `separated`."""
    if next_sentence == "none":
        yield from make_full_sentences(tokens, rng, length=length, short_seq_prob=short_seq_prob)
    else:
        make = {"pairs": make_pairs, "order": make_ordered}[next_sentence]
        for index in documents:
            yield from make(tokens, index, rng, length=length, short_seq_prob=short_seq_prob)


def make_pairs(
    tokens: Tokens, index: int, rng: random.Random, *, length: int, short_seq_prob: float
) -> Iterator[Instance]:
    """Yields segment pairs that cover document `index`, as Google's create_instances_from_document does.

    Gathers sentences until they fill a sequence of `length` tokens, then splits them at a random sentence boundary.
    With probability 0.5, and always if there is only one sentence, takes B from a random position in another document
    instead; the sentences that this frees go into the next pair. There must be at least two documents.
    """
    _, starts, documents = tokens
    max_tokens = length - 3
    target = _target(max_tokens, short_seq_prob, rng)

    sentence, last = documents[index], documents[index + 1]
    while sentence < last:
        begin = starts[sentence]
        end = _gather(starts, sentence, last, target)
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
        yield Instance(
            begin + _cut_in_front(first_size - keep_first, rng),
            keep_first,
            start + _cut_in_front(stop - start - keep_second, rng),
            keep_second,
            int(is_random_next),
        )
        sentence = end


def make_ordered(
    tokens: Tokens, index: int, rng: random.Random, *, length: int, short_seq_prob: float
) -> Iterator[Instance]:
    """Yields two consecutive segments at a time that cover document `index`, half of them swapped (Lan et al. 2020).

    Gathers sentences and splits them as `make_pairs`, a single sentence at a random token. What is too long loses its
    beginning and its end, so that the segments remain consecutive. Leaves out a single token at the document's end.
    """
    _, starts, documents = tokens
    max_tokens = length - 3
    target = _target(max_tokens, short_seq_prob, rng)

    sentence, last = documents[index], documents[index + 1]
    while sentence < last:
        end = _gather(starts, sentence, last, target)
        begin, stop = starts[sentence], starts[end]
        if end - sentence > 1:
            split = starts[sentence + 1 + _below(rng, end - sentence - 1)]
        else:
            split = begin + 1 + _below(rng, stop - begin - 1)
        sentence = end
        if stop - begin > 1:
            first, second = _truncate(split - begin, stop - split, max_tokens)
            if rng.random() < 0.5:
                yield Instance(split, second, split - first, first, 1)
            else:
                yield Instance(split - first, first, split, second, 0)


def make_full_sentences(
    tokens: Tokens, rng: random.Random, *, length: int, short_seq_prob: float
) -> Iterator[Instance]:
    """Yields single segments of full sentences, also of several documents (Liu et al. 2019, section 4.2).

    Only sentences that are longer than a sequence are cut. Uses each token once, of the [SEP] between documents
    (`separated`) those within a segment. Draws for each sequence, not for each document, whether it is a short one.
    """
    starts, documents = tokens.starts, tokens.documents
    max_tokens = length - 2
    ends = np.array(starts[1:])
    ends[np.array(documents[1:], int) - 1] -= 1  # a segment that ends with a document already has a [SEP] there
    ends = ends.tolist()

    sentence, begin = 0, 0
    while sentence < len(ends):
        end = max(sentence + 1, bisect.bisect_right(ends, begin + _target(max_tokens, short_seq_prob, rng)))
        size = ends[end - 1] - begin
        if size > max_tokens:
            yield Instance(begin, max_tokens, 0, 0, 0)
            begin += max_tokens
        else:
            yield Instance(begin, size, 0, 0, 0)
            sentence, begin = end, starts[end]


def _target(max_tokens: int, short_seq_prob: float, rng: random.Random) -> int:
    """The number of tokens to gather: `max_tokens`, or with a small probability a random number, at least 2."""
    return 2 + _below(rng, max_tokens - 1) if rng.random() < short_seq_prob else max_tokens


def _gather(starts: list[int], sentence: int, last: int, target: int) -> int:
    """The end of the sentences from `sentence` on that have `target` tokens; at least one, and not beyond `last`."""
    return min(last, bisect.bisect_left(starts, starts[sentence] + target, sentence + 1))


def _below(rng: random.Random, limit: int) -> int:
    """A random number from 0 to limit - 1; `rng.randrange` takes five times as long."""
    return int(rng.random() * limit)


def _random_segment(starts: list[int], first: int, last: int, target: int, rng: random.Random) -> tuple[int, int]:
    """Sentences of a document, from a random one on, until there are `target` tokens; at least one sentence."""
    sentence = first + _below(rng, last - first)
    return starts[sentence], starts[_gather(starts, sentence, last, max(target, 1))]


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
