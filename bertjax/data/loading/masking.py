"""Masks tokens for masked-language-model training (Devlin et al. 2019, section 3.1).

All random numbers are drawn first, as arrays by row, so that a row's mask does not depend on the rows beside it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.transforms import BatchTransform
from bertjax.text.tokenizer import Tokenizer

# Lengths of spans, in words: geometric, cut off at 10; 3.8 on average (Joshi et al. 2020, section 3.1).
SPAN_PROB, MAX_SPAN_WORDS = 0.2, 10
SPAN_LENGTHS = SPAN_PROB * (1 - SPAN_PROB) ** np.arange(MAX_SPAN_WORDS)
SPAN_LENGTHS /= SPAN_LENGTHS.sum()
NONE = np.uint32(2**32 - 1)


class Rules(NamedTuple):
    """How tokens are masked.

    Attributes:
      masked_lm_prob: share of a row's tokens that are selected.
      split: shares of the selected tokens that become [MASK], become a random piece, and stay as they are.
      max_predictions_per_seq: tokens that are selected at most.
      continues_word: `[vocab_size]` booleans: True if a piece continues a word; None to select single tokens.
      spans: whether to select spans of whole words (SpanBERT).
    """

    masked_lm_prob: float
    split: tuple[float, float, float]
    max_predictions_per_seq: int
    vocab_size: int
    mask_id: int
    cls_id: int
    sep_id: int
    continues_word: np.ndarray | None = None
    spans: bool = False


def rules_of(data: Mapping, tokenizer: Tokenizer, max_predictions_per_seq: int) -> Rules:
    """Returns the rules of `config.data`."""
    whole_words = data["do_whole_word_mask"] or data["do_span_mask"]
    return Rules(
        masked_lm_prob=data["masked_lm_prob"],
        split=tuple(data["masked_lm_split"]),
        max_predictions_per_seq=max_predictions_per_seq,
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        continues_word=tokenizer.continues_word if whole_words else None,
        spans=data["do_span_mask"],
    )


class Draws(NamedTuple):
    """All random numbers that masking takes. The first axis of each array is rows.

    Attributes:
      order: `[rows, length]` uint32: tokens, words or beginnings of spans are tried in this order.
      words: `[rows, max_predictions_per_seq]` uint8: `words[:, i]` is how many words a span has before which i tokens
        of its row were selected.
      fates: `[rows, max_predictions_per_seq]` float32 from 0 to 1: what becomes of each prediction; with spans,
        `fates[:, i]` is for all tokens of such a span.
      pieces: `[rows, max_predictions_per_seq]` int32: random pieces.
    """

    order: np.ndarray
    words: np.ndarray
    fates: np.ndarray
    pieces: np.ndarray


def draw(rng: np.random.Generator, rows: int, length: int, rules: Rules) -> Draws:
    """Draws what `mask_tokens` needs for `[rows, length]` ids."""
    predictions = (rows, rules.max_predictions_per_seq)
    words = np.ones(predictions, np.uint8)
    if rules.spans:
        words += np.searchsorted(np.cumsum(SPAN_LENGTHS[:-1]), rng.random(predictions), "right").astype(np.uint8)
    return Draws(
        order=rng.integers(2**32, size=(rows, length), dtype=np.uint32),
        words=words,
        fates=rng.random(predictions, np.float32),
        pieces=rng.integers(rules.vocab_size, size=predictions, dtype=np.int32),
    )


class Masking(NamedTuple):
    """Masked token ids `[rows, length]`, and the predictions of each row in ascending order of position, padded with 0.

    Attributes:
      ids: `[rows, length]`.
      positions, labels: `[rows, max_predictions_per_seq]`.
      counts: `[rows]`, predictions of each row.
    """

    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    counts: np.ndarray


class DynamicMasking(BatchTransform):
    """Masks the tokens of a row when the row is read. Each reading of the row draws another mask."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> Batch:
        """Returns the fields of `Draws`."""
        return draw(rng, rows, length, self.rules)._asdict()

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the masked `input_ids`, and the predictions."""
        masking = mask_tokens(batch["input_ids"], batch["segments"].sum(1), Draws(**draws), self.rules)
        used = np.arange(self.rules.max_predictions_per_seq) < masking.counts[:, None]
        return {
            "input_ids": masking.ids,
            "word_positions": masking.positions,
            "word_ids": masking.labels,
            "word_weights": used.astype(np.float32),
        }


def mask_tokens(ids: np.ndarray, sizes: np.ndarray, draws: Draws, rules: Rules) -> Masking:
    """Masks `masked_lm_prob` of each row's tokens, at least one and at most `max_predictions_per_seq`.

    As in Google's create_masked_lm_predictions, [CLS] and [SEP] count towards the total length but are never selected,
    and words that would exceed the number are passed over. Each token's fate is its own, but tokens of a span share it.

    Args:
      ids: `[rows, length]`, padded. Integers of any type, which `positions` and `labels` will have too.
      sizes: `[rows]`, tokens of each row.
    """
    length = ids.shape[1]
    allowed = (ids != rules.cls_id) & (ids != rules.sep_id)
    allowed &= np.arange(length, dtype=np.int32) < np.asarray(sizes, np.int32)[:, None]
    wanted = np.clip(np.rint(sizes * rules.masked_lm_prob), 1, rules.max_predictions_per_seq).astype(np.int32)
    if rules.continues_word is None:
        selected, counts = _select_tokens(allowed, wanted, draws)
    else:
        selected, counts, span = _select_words(allowed, rules.continues_word[ids], wanted, draws)

    used = np.arange(rules.max_predictions_per_seq, dtype=np.int32) < counts[:, None]
    fates = draws.fates[selected // length, span] if rules.spans else draws.fates[used]
    found = ids.ravel()[selected]
    positions, labels = np.zeros(used.shape, ids.dtype), np.zeros(used.shape, ids.dtype)
    positions[used], labels[used] = selected % length, found

    to_mask, to_random, _ = rules.split
    masked = ids.copy()
    masked.ravel()[selected] = np.where(
        fates < to_mask, rules.mask_id, np.where(fates < to_mask + to_random, draws.pieces[used], found)
    )
    return Masking(masked, positions, labels, counts)


def first_allowed(order: np.ndarray, allowed: np.ndarray, most: int) -> np.ndarray:
    """The columns of the `most` first allowed elements of each row, in this order: `[rows, most]`, padded with `NONE`.

    Sorts order and column as one number, which is several times as fast as `np.argsort`.
    """
    length = order.shape[1]
    low = np.uint32((1 << length.bit_length()) - 1)  # the bits of a column, or of `length`
    keys = order & ~low
    keys |= np.arange(length, dtype=np.uint32)
    keys[~allowed] = NONE
    if most < length:
        keys.partition(most, axis=1)
        keys = keys[:, :most]
    keys.sort(axis=1)
    return np.where(keys == NONE, NONE, keys & low)


def _select_tokens(allowed, wanted, draws) -> tuple[np.ndarray, np.ndarray]:
    """Selects `wanted` tokens of each row.

    Returns:
      The places of the selected tokens in the flattened rows, ascending; how many there are in each row.
    """
    rows, length = allowed.shape
    columns = first_allowed(draws.order, allowed, min(int(wanted.max(initial=1)), length))
    columns[np.arange(columns.shape[1], dtype=np.int32) >= wanted[:, None]] = NONE
    columns.sort(axis=1)
    used = columns != NONE
    columns += np.arange(0, rows * length, length, dtype=np.uint32)[:, None]
    return columns[used].astype(np.intp), used.sum(1)


def _select_words(allowed, continues, wanted, draws) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Selects spans of whole words, at most `wanted` tokens of each row.

    A span ends before a special token, a word that is already selected, and a word that would exceed the number.

    Returns:
      The same as `_select_tokens`; for each token, how many were selected in its row before its span.
    """
    rows, length = allowed.shape
    inner = np.zeros(allowed.shape, bool)  # not the first token of its word; a special token ends a word
    inner[:, 1:] = allowed[:, 1:] & allowed[:, :-1] & continues[:, 1:]
    begins = np.append(allowed & ~inner, False)
    edges = np.append(np.flatnonzero(~inner), allowed.size)
    sizes = np.zeros(allowed.size, np.int32)  # sizes of the words, at the places where they begin
    sizes[edges[:-1]] = np.diff(edges)
    order = np.full((rows, length + 1), NONE)  # columns where words begin, in the order in which they are tried
    order[:, :-1] = first_allowed(draws.order, begins[:-1].reshape(rows, length), length)

    taken, span_of = np.zeros(allowed.size, bool), np.zeros(allowed.size, np.int32)
    left = wanted.copy()
    # For each row that is not finished: the word to try next, whether the span goes on with it, how many tokens were
    # selected before the span, how many words it lacks, and how many spans were tried.
    row = np.arange(rows)
    word, goes_on = row * length + order[:, 0], np.zeros(rows, bool)
    span = lacks = spans = np.zeros(rows, np.int32)
    while (unfinished := (left[row] > 0) & (word < allowed.size)).any():
        row, word, goes_on, span, lacks, spans = (x[unfinished] for x in (row, word, goes_on, span, lacks, spans))
        span = np.where(goes_on, span, wanted[row] - left[row])
        lacks = np.where(goes_on, lacks, draws.words[row, span]) - 1
        spans = spans + ~goes_on
        size = sizes[word]
        fits = ~taken[word] & (size <= left[row])
        left[row] -= size * fits
        taken[word[fits]], span_of[word[fits]] = True, span[fits]
        following = word + size
        goes_on = fits & (lacks > 0) & begins[following] & (following % length > 0)
        word = np.where(goes_on, following, row * length + order[row, spans])

    words = np.flatnonzero(taken)
    sizes, span_of = sizes[words], span_of[words]
    before = np.cumsum(sizes) - sizes
    return np.repeat(words - before, sizes) + np.arange(sizes.sum()), wanted - left, np.repeat(span_of, sizes)
