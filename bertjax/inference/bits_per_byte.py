"""Bits per byte, which compare models with different vocabularies.

For a masked model, 15 % of the words between spaces are masked, with all of their tokens. The negative log-likelihood
of these tokens is divided by the number of bytes of these words. All models have the same masked words. The number of
tokens of a masked word is visible to the model.

For a left-to-right model, the negative log-likelihood of all tokens is divided by the number of bytes of the text.
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
    """Returns random windows of lines of text. A window consists of whole words of one line.

    The size of a window is the number of its bytes, with a space after each word. A word above `longest` is left out.

    Args:
      lines: the lines of text.
      most: the maximum number of windows.
      shortest: the minimum size of the last window of a line; a smaller one is left out.
      longest: the maximum size of a window.
    """
    candidates = [window for line in lines for window in _cut(line.split(), shortest, longest)]
    chosen = np.random.default_rng(SEED).permutation(len(candidates))[:most]
    return [candidates[i] for i in sorted(chosen)]


def _cut(words: list[str], shortest: int, longest: int) -> Iterator[str]:
    window: list[str] = []
    size = 0
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
    """Returns whether each word of each text is masked: a random 15 % of the words that `may_hide` allows."""
    draw = np.random.default_rng(SEED).random
    return [[may_hide(word) and draw() < SHARE for word in text.split(" ")] for text in texts]


def halved(
    text: str, hidden: Sequence[bool], tokenizer: Tokenizer, length: float
) -> Iterator[tuple[str, Sequence[bool]]]:
    """Halves a text repeatedly, and yields parts with at most `length` tokens. Longer words are left out.

    Yields:
      A part of the text, and the elements of `hidden` for its words.
    """
    words = text.split(" ")
    if len(tokenizer.framed(tokenizer.encode(text).ids)) <= length:
        yield text, hidden
    elif len(words) > 1:
        middle = len(words) // 2
        for part in (slice(middle), slice(middle, None)):
            yield from halved(" ".join(words[part]), hidden[part], tokenizer, length)


def masked(text: str, hidden: Sequence[bool], tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Yields the ids of a text with masks, the positions of the masks, and the ids of the masked tokens.

    Yields nothing if no word is masked.

    Raises:
      UserError: if a masked word is not in the vocabulary.
    """
    encoded, words = tokenizer.encode(text), text.split(" ")
    # A word includes the space before it, which may be a separate token. The text has no space before the first word.
    word_at = [number for number, word in enumerate(words) for _ in range(len(word) + (number > 0))]
    owners = [word_at[max(end, 1) - 1] for _, end in encoded.offsets]
    ids = tokenizer.framed(encoded.ids)
    positions = [place for place, owner in enumerate(owners, len(tokenizer.begin)) if hidden[owner]]
    tokens = [ids[place] for place in positions]
    if tokenizer.unk_id in tokens:
        raise UserError(f"{text!r}: the vocabulary has no tokens for a word of this text; choose another text")
    for place in positions:
        ids[place] = tokenizer.mask_id
    if positions:
        yield ids, positions, tokens


def bits_per_byte(
    model: BertForMaskedLM,
    params: dict,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    hidden: Sequence[Sequence[bool]],
    length: int,
) -> dict[str, float]:
    """Returns the bits per byte of texts.

    Args:
      model: the language model.
      params: the params of the model.
      tokenizer: the tokenizer.
      texts: the texts.
      hidden: whether each word of each text is masked, see `hidden_words`; has no effect for a left-to-right model.
      length: the maximum number of tokens of a sequence. Longer texts are halved, unless the model is recurrent.

    Returns:
      `bits_per_byte`; `words`, the number of masked words; and `bytes`, the number of bytes of these words. For a
      left-to-right model, `words` and `bytes` count the whole texts.

    Raises:
      UserError: if no word is masked, or if a left-to-right model has no text.
    """
    longest = length if likelihood.part_of(model.config) is None else math.inf
    parts = [part for text, masks in zip(texts, hidden) for part in halved(text, masks, tokenizer, longest)]
    is_causal = families.family_of(model.config).lm_type(model.config) == "causal"
    all_words = [pair for text, masks in parts for pair in zip(text.split(" "), masks)]
    words = [word for word, is_hidden in all_words if is_hidden or is_causal]
    size = sum(len(text.encode()) for text, _ in parts) if is_causal else sum(len(word.encode()) for word in words)
    if not size:
        raise UserError(f"bits per byte: {len(texts)} windows of text have no word to mask; add text")
    if is_causal:
        total = sum(likelihood.log_likelihoods(model, params, tokenizer, (text for text, _ in parts)))
    else:
        rows = [
            likelihood.PredictedRow(number, *row)
            for number, part in enumerate(parts)
            for row in masked(*part, tokenizer)
        ]
        total = likelihood.log_likelihoods_of_rows(model, params, tokenizer, rows, len(parts)).sum()
    return {"bits_per_byte": float(-total / np.log(2) / size), "words": len(words), "bytes": size}
