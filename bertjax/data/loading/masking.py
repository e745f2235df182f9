"""Masks tokens for masked-language-model training (Devlin et al. 2019, section 3.1).

All random numbers are drawn first, in arrays whose first axis is rows. Therefore the mask of a row does not depend on
the rows of the same batch.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.transforms import BatchTransform
from bertjax.text.tokenizer import Tokenizer

# The probabilities of span lengths in words: geometric, at most 10 words, 3.8 words on average (Joshi et al. 2020,
# section 3.1).
SPAN_PROB, MAX_SPAN_WORDS = 0.2, 10
SPAN_LENGTHS = SPAN_PROB * (1 - SPAN_PROB) ** np.arange(MAX_SPAN_WORDS)
SPAN_LENGTHS /= SPAN_LENGTHS.sum()
NONE = np.uint32(2**32 - 1)


class Masking(NamedTuple):
    """Masked token ids, and the predictions of each row in ascending order of position.

    Attributes:
      ids: `[rows, length]`, the masked token ids.
      positions: `[rows, max_predictions_per_seq]`, the positions of the predictions, padded with 0.
      labels: `[rows, max_predictions_per_seq]`, the ids at these positions before masking, padded with 0.
      counts: `[rows]`, the number of predictions of each row.
    """

    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    counts: np.ndarray


@dataclasses.dataclass(frozen=True)
class TokenMasking(BatchTransform):
    """Masks the tokens of rows. With dynamic masking, each reading of a row draws a new mask.

    Attributes:
      masked_lm_prob: the share of the tokens of a row that are selected.
      split: the shares of the selected tokens that become [MASK], become a random token, and stay unchanged.
      max_predictions_per_seq: the largest number of selected tokens.
      vocab_size: the vocabulary size.
      mask_id: the id of [MASK].
      cls_id: the id of [CLS].
      sep_id: the id of [SEP].
      continues_word: `[vocab_size]` booleans: True if a token continues a word; None to select single tokens.
      spans: whether to select spans of whole words (SpanBERT).
    """

    masked_lm_prob: float
    split: tuple[float, ...]
    max_predictions_per_seq: int
    vocab_size: int
    mask_id: int
    cls_id: int
    sep_id: int
    continues_word: np.ndarray | None = None
    spans: bool = False

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> Batch:
        """Returns the random numbers of masking.

        Returns:
          `order` `[rows, length]` uint32: tokens, words or starts of spans are tried in ascending order of these
          numbers. `span_words` `[rows, max_predictions_per_seq]` uint8: a span that starts after i selected tokens of
          the row has `span_words[:, i]` words. `replacements` `[rows, max_predictions_per_seq]` float32 from 0 to 1
          decide whether selected tokens are masked, random or unchanged. Without spans, number i is for prediction i.
          With spans, number i is for all tokens of the span that starts after i selected tokens of the row.
          `random_tokens` `[rows, max_predictions_per_seq]` int32, a random token for each prediction.
        """
        shape = (rows, self.max_predictions_per_seq)
        span_words = np.ones(shape, np.uint8)
        if self.spans:
            span_words += np.searchsorted(np.cumsum(SPAN_LENGTHS[:-1]), rng.random(shape), "right").astype(np.uint8)
        return {
            "order": rng.integers(2**32, size=(rows, length), dtype=np.uint32),
            "span_words": span_words,
            "replacements": rng.random(shape, np.float32),
            "random_tokens": rng.integers(self.vocab_size, size=shape, dtype=np.int32),
        }

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the masked `input_ids`, and the predictions."""
        masking = self.mask(batch["input_ids"], batch["segments"].sum(1), draws)
        is_prediction = np.arange(self.max_predictions_per_seq) < masking.counts[:, None]
        return {
            "input_ids": masking.ids,
            "word_positions": masking.positions,
            "word_ids": masking.labels,
            "word_weights": is_prediction.astype(np.float32),
        }

    def mask(self, ids: np.ndarray, sizes: np.ndarray, draws: Batch) -> Masking:
        """Masks the share `masked_lm_prob` of the tokens of each row: 1 to `max_predictions_per_seq` tokens.

        [CLS] and [SEP] count as tokens but are never selected. Words with more tokens than the number that is left are
        skipped, as in Google's create_masked_lm_predictions. The tokens of a span are all masked, all random, or all
        unchanged.

        Args:
          ids: `[rows, length]`, padded, of any integer type. The positions and labels have the same type.
          sizes: `[rows]`, the number of tokens of each row.
          draws: the random numbers, from `draw`.
        """
        length = ids.shape[1]
        allowed = (ids != self.cls_id) & (ids != self.sep_id)
        allowed &= np.arange(length, dtype=np.int32) < np.asarray(sizes, np.int32)[:, None]
        wanted = np.clip(np.rint(sizes * self.masked_lm_prob), 1, self.max_predictions_per_seq).astype(np.int32)
        if self.continues_word is None:
            selected, counts = _select_tokens(allowed, wanted, draws)
            span_start = None
        else:
            selected, counts, span_start = _select_words(allowed, self.continues_word[ids], wanted, draws)

        is_prediction = np.arange(self.max_predictions_per_seq, dtype=np.int32) < counts[:, None]
        replacements = (
            draws["replacements"][selected // length, span_start]
            if self.spans
            else draws["replacements"][is_prediction]
        )
        selected_ids = ids.ravel()[selected]
        positions, labels = np.zeros(is_prediction.shape, ids.dtype), np.zeros(is_prediction.shape, ids.dtype)
        positions[is_prediction], labels[is_prediction] = selected % length, selected_ids

        mask_share, random_share, _ = self.split
        is_mask, is_random = replacements < mask_share, replacements < mask_share + random_share
        random_or_same = np.where(is_random, draws["random_tokens"][is_prediction], selected_ids)
        masked = ids.copy()
        masked.ravel()[selected] = np.where(is_mask, self.mask_id, random_or_same)
        return Masking(masked, positions, labels, counts)


@dataclasses.dataclass(frozen=True)
class PermutedMasking(BatchTransform):
    """Masks tokens, and draws the order in which they are predicted. Each reading of a row draws another order.

    Attributes:
      masking: selects and masks the predicted tokens.
    """

    masking: TokenMasking

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> Batch:
        """Returns the random numbers of `masking`, and the order.

        Returns:
          The arrays of `TokenMasking.draw`, and `prediction_order` `[rows, max_predictions_per_seq]` float32. Tokens
          are predicted in ascending order of these numbers.
        """
        draws = self.masking.draw(rng, rows, length)
        return draws | {"prediction_order": rng.random((rows, self.masking.max_predictions_per_seq), np.float32)}

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the predictions, and two arrays `[rows, length]`; `input_ids` does not change.

        `masked_ids` are the masked token ids. `ranks` are the order 1, 2, ... of the predicted tokens, and 0 for all
        other tokens.
        """
        masked = self.masking(batch, draws)
        is_prediction = masked["word_weights"] > 0
        order = np.where(is_prediction, draws["prediction_order"], np.float32(2)).argsort(axis=1, kind="stable")
        numbers = np.broadcast_to(1 + np.arange(order.shape[1], dtype=np.int32), order.shape)
        ranks_of_predictions, ranks = np.zeros(order.shape, np.int32), np.zeros(batch["input_ids"].shape, np.int32)
        np.put_along_axis(ranks_of_predictions, order, numbers, axis=1)
        row = np.nonzero(is_prediction)[0]
        ranks[row, masked["word_positions"][is_prediction]] = ranks_of_predictions[is_prediction]
        return {"masked_ids": masked.pop("input_ids"), "ranks": ranks, **masked}


def masking_of(data: Mapping, tokenizer: Tokenizer, max_predictions_per_seq: int) -> TokenMasking:
    """Returns the masking of `config.data`."""
    whole_words = data["do_whole_word_mask"] or data["do_span_mask"]
    return TokenMasking(
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


def first_allowed(order: np.ndarray, allowed: np.ndarray, count: int) -> np.ndarray:
    """Returns the columns of the first allowed elements of each row.

    The function sorts order and column as one number, which is several times as fast as `np.argsort`.

    Args:
      order: `[rows, length]` uint32. Elements come in ascending order of these numbers.
      allowed: `[rows, length]` booleans.
      count: the number of columns to return.

    Returns:
      `[rows, count]`, padded with `NONE`.
    """
    length = order.shape[1]
    low = np.uint32((1 << length.bit_length()) - 1)  # the bits of a column, or of `length`
    keys = order & ~low
    keys |= np.arange(length, dtype=np.uint32)
    keys[~allowed] = NONE
    if count < length:
        keys.partition(count, axis=1)
        keys = keys[:, :count]
    keys.sort(axis=1)
    return np.where(keys == NONE, NONE, keys & low)


def _select_tokens(allowed: np.ndarray, wanted: np.ndarray, draws: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Selects single tokens.

    Args:
      allowed: `[rows, length]` booleans.
      wanted: `[rows]`, the number of tokens to select in each row.
      draws: the random numbers.

    Returns:
      The positions of the selected tokens in the flattened rows, ascending; and the number of selected tokens of each
      row.
    """
    rows, length = allowed.shape
    columns = first_allowed(draws["order"], allowed, min(int(wanted.max(initial=1)), length))
    columns[np.arange(columns.shape[1], dtype=np.int32) >= wanted[:, None]] = NONE
    columns.sort(axis=1)
    is_selected = columns != NONE
    columns += np.arange(0, rows * length, length, dtype=np.uint32)[:, None]
    return columns[is_selected].astype(np.intp), is_selected.sum(1)


def _select_words(
    allowed: np.ndarray, continues_word: np.ndarray, wanted: np.ndarray, draws: Batch
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Selects spans of whole words.

    A span ends before a special token, before a selected word, and before a word that would exceed `wanted`.

    Args:
      allowed: `[rows, length]` booleans.
      continues_word: `[rows, length]` booleans, True for tokens that continue a word.
      wanted: `[rows]`, the largest number of tokens to select in each row.
      draws: the random numbers.

    Returns:
      The positions of the selected tokens in the flattened rows, ascending; the number of selected tokens of each row;
      and for each selected token, the number of tokens of the row that were selected before the token's span.
    """
    rows, length = allowed.shape
    # Tokens after the first token of a word. A special token ends a word.
    is_inside = np.zeros(allowed.shape, bool)
    is_inside[:, 1:] = allowed[:, 1:] & allowed[:, :-1] & continues_word[:, 1:]
    is_start = np.append(allowed & ~is_inside, False)
    edges = np.append(np.flatnonzero(~is_inside), allowed.size)
    sizes = np.zeros(allowed.size, np.int32)  # the size of each word, at the first token of the word
    sizes[edges[:-1]] = np.diff(edges)
    order = np.full((rows, length + 1), NONE)  # the columns where words start, in the order of the attempts
    order[:, :-1] = first_allowed(draws["order"], is_start[:-1].reshape(rows, length), length)

    is_selected, span_of_word = np.zeros(allowed.size, bool), np.zeros(allowed.size, np.int32)
    left = wanted.copy()
    # The state of each unfinished row: the next word to try, whether this word continues the span, the number of tokens
    # that were selected before the span, the number of words that the span misses, and the number of attempted spans.
    row = np.arange(rows)
    word, in_span = row * length + order[:, 0], np.zeros(rows, bool)
    span_start = missing_words = attempts = np.zeros(rows, np.int32)
    while (unfinished := (left[row] > 0) & (word < allowed.size)).any():
        state = (row, word, in_span, span_start, missing_words, attempts)
        row, word, in_span, span_start, missing_words, attempts = (array[unfinished] for array in state)
        span_start = np.where(in_span, span_start, wanted[row] - left[row])
        missing_words = np.where(in_span, missing_words, draws["span_words"][row, span_start]) - 1
        attempts = attempts + ~in_span
        size = sizes[word]
        fits = ~is_selected[word] & (size <= left[row])
        left[row] -= size * fits
        is_selected[word[fits]], span_of_word[word[fits]] = True, span_start[fits]
        next_word = word + size
        in_span = fits & (missing_words > 0) & is_start[next_word] & (next_word % length > 0)
        word = np.where(in_span, next_word, row * length + order[row, attempts])

    words = np.flatnonzero(is_selected)
    sizes, span_of_word = sizes[words], span_of_word[words]
    before = np.cumsum(sizes) - sizes
    tokens = np.repeat(words - before, sizes) + np.arange(sizes.sum())
    return tokens, wanted - left, np.repeat(span_of_word, sizes)
