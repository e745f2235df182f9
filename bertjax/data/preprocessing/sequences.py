"""Makes the sequences of pre-training from documents.

The sequences are segment pairs (Google's create_pretraining_data.py), segments in order or swapped (ALBERT), or full
sentences (RoBERTa).
"""

import bisect
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Tokens(NamedTuple):
    """The tokens of documents: sentence i is `ids[starts[i] : starts[i + 1]]`. Sentences are not empty.

    Attributes:
      ids: `[tokens]`.
      starts: `[sentences + 1]`, also the end of the last sentence.
      documents: `[documents + 1]`. Document i has the sentences `documents[i] : documents[i + 1]`, at least one.
    """

    ids: np.ndarray
    starts: list[int]
    documents: list[int]


def as_tokens(ids: np.ndarray, sizes: np.ndarray, sentences: Sequence[int]) -> Tokens:
    """Returns the tokens of documents. Removes sentences without tokens, and documents without sentences.

    Args:
      ids: `[tokens]` of all sentences in succession.
      sizes: the number of tokens of each sentence.
      sentences: the number of sentences of each document.
    """
    document = np.repeat(np.arange(len(sentences)), sentences)[sizes > 0]
    counts = np.bincount(document, minlength=1)
    starts, documents = np.cumsum(sizes[sizes > 0]), np.cumsum(counts[counts > 0])
    return Tokens(ids, [0, *starts.tolist()], [0, *documents.tolist()])


def of_documents(tokens: Tokens, documents: np.ndarray) -> Tokens:
    """Returns the tokens of the documents with these ascending indices."""
    sizes, counts = np.diff(tokens.starts), np.diff(tokens.documents)
    used = np.repeat(np.isin(np.arange(len(counts)), documents), counts)
    return as_tokens(tokens.ids[np.repeat(used, sizes)], sizes[used], counts[documents])


def separated(tokens: Tokens, sep_id: int) -> Tokens:
    """Appends [SEP] to the last sentence of each document."""
    starts, documents = np.array(tokens.starts), np.array(tokens.documents)
    ids = np.insert(tokens.ids, starts[documents[1:]], sep_id)
    return Tokens(
        ids, (starts + np.searchsorted(documents[1:], np.arange(len(starts)), "right")).tolist(), tokens.documents
    )


class Instance(NamedTuple):
    """A sequence: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] if the size of B is 0. Segments are spans of the tokens.

    Attributes:
      first_start: the first token of A.
      first_size: the number of tokens of A, at least one.
      second_start: the first token of B.
      second_size: the number of tokens of B.
      label: 1 if B is a random segment, or if the segments are swapped.
    """

    first_start: int
    first_size: int
    second_start: int
    second_size: int
    label: int


def make_instances(
    tokens: Tokens,
    documents: Sequence[int],
    next_sentence: str,
    rng: random.Random,
    *,
    length: int,
    short_seq_prob: float = 0.1,
) -> Iterator[Instance]:
    """Yields the sequences of documents.

    Args:
      tokens: the tokens; `separated` tokens for `next_sentence="none"`.
      documents: the indices of the documents; ignored for `next_sentence="none"`, which uses all documents.
      next_sentence: pairs, order, or none (full sentences).
      rng: the random generator.
      length: the sequence length.
      short_seq_prob: the probability of a shorter sequence.
    """
    if next_sentence == "none":
        yield from make_full_sentences(tokens, rng, length=length, short_seq_prob=short_seq_prob)
    else:
        make = {"pairs": make_pairs, "order": make_ordered}[next_sentence]
        for index in documents:
            yield from make(tokens, index, rng, length=length, short_seq_prob=short_seq_prob)


def make_pairs(
    tokens: Tokens, index: int, rng: random.Random, *, length: int, short_seq_prob: float
) -> Iterator[Instance]:
    """Yields segment pairs that cover document `index`, like create_instances_from_document of Google.

    Gathers sentences until they fill a sequence of `length` tokens, then splits them at a random sentence boundary.
    With probability 0.5, and always for a single sentence, B is a random segment of another document; the sentences of
    the original B are then part of the next pair. There must be at least two documents.
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
    """Yields pairs of consecutive segments that cover document `index`, half of them swapped (Lan et al. 2020).

    Gathers and splits sentences like `make_pairs`; splits a single sentence at a random token. Segments that are too
    long lose tokens at their outer ends, so that they remain consecutive. Omits a single last token of a document.
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
    """Yields single segments of full sentences, which may span documents (Liu et al. 2019, section 4.2).

    Cuts only sentences that are longer than a sequence. Uses each token once, and the [SEP] of a document (`separated`)
    only inside a segment. Draws the length for each sequence, not for each document.
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
    """Returns the number of tokens to gather: `max_tokens`, or with `short_seq_prob` a random number of at least 2."""
    return 2 + _below(rng, max_tokens - 1) if rng.random() < short_seq_prob else max_tokens


def _gather(starts: list[int], sentence: int, last: int, target: int) -> int:
    """Returns the end of the sentences from `sentence` that reach `target` tokens: at least one, up to `last`."""
    return min(last, bisect.bisect_left(starts, starts[sentence] + target, sentence + 1))


def _below(rng: random.Random, limit: int) -> int:
    """Returns a random number from 0 to limit - 1; `rng.randrange` is five times slower."""
    return int(rng.random() * limit)


def _random_segment(starts: list[int], first: int, last: int, target: int, rng: random.Random) -> tuple[int, int]:
    """Returns start and end of consecutive sentences of a document with `target` tokens, from a random sentence."""
    sentence = first + _below(rng, last - first)
    return starts[sentence], starts[_gather(starts, sentence, last, max(target, 1))]


def _truncate(first: int, second: int, max_tokens: int) -> tuple[int, int]:
    """Returns the sizes after the longer segment, or B on a tie, has repeatedly lost a token (truncate_seq_pair)."""
    excess = max(0, first + second - max_tokens)
    difference = first - second
    lead = min(excess, abs(difference))
    first -= lead if difference > 0 else 0
    second -= lead if difference < 0 else 0
    return first - (excess - lead) // 2, second - (excess - lead + 1) // 2


def _cut_in_front(excess: int, rng: random.Random) -> int:
    """Returns the number of tokens to remove in front, if each removed token is in front with probability 0.5."""
    return rng.getrandbits(excess).bit_count() if excess else 0
