"""Bits per byte, by which models with different vocabularies can be compared.

Of a model that fills masks, whatever it is, the same 15 % of the words between spaces are hidden, all pieces of each,
and what it takes to name these pieces is divided by the bytes of these words. How many pieces a word has can be seen.
Of a model that predicts next words, it is what all pieces of the text take, divided by its bytes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from bertjax.common.errors import UserError
from bertjax.inference import likelihood
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.text.tokenizer import Tokenizer

SHARE, SEED = 0.15, 0


def windows(lines: Iterable[str], most: int, shortest: int, longest: int) -> list[str]:
    """Returns some windows of lines of text, at random: whole words, of so many bytes with the space after each."""
    found = [window for line in lines for window in _cut(line.split(), shortest, longest)]
    chosen = np.random.default_rng(SEED).permutation(len(found))[:most]
    return [found[i] for i in sorted(chosen)]


def _cut(words: list[str], shortest: int, longest: int) -> Iterator[str]:
    window, size = [], 0
    for word in words:
        bytes_more = len(word.encode()) + 1
        if window and size + bytes_more > longest:
            yield " ".join(window)
            window, size = [], 0
        if bytes_more <= longest:
            window, size = [*window, word], size + bytes_more
    if size >= shortest:
        yield " ".join(window)


def hidden_words(texts: Iterable[str], may_hide: Callable[[str], bool]) -> list[list[bool]]:
    """Returns of each word of each text whether it is hidden, at random among those that may be."""
    draw = np.random.default_rng(SEED).random
    return [[may_hide(word) and draw() < SHARE for word in text.split(" ")] for text in texts]


def halved(
    text: str, hidden: Sequence[bool], tokenizer: Tokenizer, length: int
) -> Iterator[tuple[str, Sequence[bool]]]:
    """Yields a text and which words of it are hidden, or its halves, until they have `length` tokens at most. A
    word that has more is left out.
    """
    words = text.split(" ")
    if len(tokenizer.framed(tokenizer.encode(text).ids)) <= length:
        yield text, hidden
    elif len(words) > 1:
        middle = len(words) // 2
        for part in (slice(middle), slice(middle, None)):
            yield from halved(" ".join(words[part]), hidden[part], tokenizer, length)


def masked(text: str, hidden: Sequence[bool], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yields ids with masks, the positions of these, and the pieces that they hide, if any are.

    Raises `UserError` if a hidden word is not in the vocabulary.
    """
    encoded, words = tokenizer.encode(text), text.split(" ")
    # With the space before it, which may be a piece of its own; the first word's has no place in the text.
    word_at = [number for number, word in enumerate(words) for _ in range(len(word) + (number > 0))]
    owners = [word_at[max(end, 1) - 1] for _, end in encoded.offsets]
    ids = tokenizer.framed(encoded.ids)
    positions = [place for place, owner in enumerate(owners, len(tokenizer.begin)) if hidden[owner]]
    pieces = [ids[place] for place in positions]
    if tokenizer.unk_id in pieces:
        raise UserError(f"{text!r}: the vocabulary has no pieces for one of its words")
    for place in positions:
        ids[place] = tokenizer.mask_id
    if positions:
        yield ids, positions, pieces


def bits_per_byte(
    model: BertForMaskedLM,
    params,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    hidden: Sequence[Sequence[bool]],
    length: int,
) -> dict[str, float]:
    """Returns the bits per byte of some texts, and the words and bytes that these are of.

    Args:
      hidden: of each word of each text, whether it is hidden; of no effect for a model that predicts next words.
      length: tokens of the longest sequence; longer texts are halved, unless the model has a memory.

    Raises `UserError` if none is hidden.
    """
    longest = length if likelihood.part_of(model.config) is None else math.inf
    parts = [part for text, which in zip(texts, hidden) for part in halved(text, which, tokenizer, longest)]
    says_all = families.family_of(model.config).lm_type(model.config) == "causal"
    all_words = [pair for text, which in parts for pair in zip(text.split(" "), which)]
    words = [word for word, is_hidden in all_words if is_hidden or says_all]
    size = sum(len(text.encode()) for text, _ in parts) if says_all else sum(len(word.encode()) for word in words)
    if not size:
        raise UserError(
            f"bits per byte: {len(texts)} windows of text have no word that could be hidden; give more text"
        )
    if says_all:
        total = sum(likelihood.log_likelihoods(model, params, tokenizer, (text for text, _ in parts)))
    else:
        rows = [
            likelihood.PredictedRow(number, *each)
            for number, part in enumerate(parts)
            for each in masked(*part, tokenizer)
        ]
        total = likelihood.log_likelihoods_of_rows(model, params, tokenizer, rows, len(parts)).sum()
    return {"bits_per_byte": float(-total / np.log(2) / size), "words": len(words), "bytes": size}
