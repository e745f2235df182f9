"""Draws the order in which a sequence's tokens are predicted (XLNet; Yang et al. 2019, sections 2.2 and 2.3).

The tokens at the end of the order are predicted, and those before them need no order: all see them. Which tokens are
predicted is chosen as in XLNet's released data code: spans of whole words, each in a context of so many times its words
in tokens, one after the other from the beginning of a row on; then single tokens, until there are enough.
"""

from typing import NamedTuple

import numpy as np

from bertjax.data.batch import Batch
from bertjax.data.loading.masking import first_allowed
from bertjax.data.loading.transforms import BatchTransform
from bertjax.text.tokenizer import Tokenizer


class PermutationRules(NamedTuple):
    """How orders are drawn.

    Attributes:
      k: one of so many tokens is predicted.
      max_span_words: words of a span, at most, of which n are n times as rare as one; 0: there are only single tokens.
      max_predictions_per_seq: tokens that are predicted at most.
      continues_word: `[vocab_size]` booleans: True if a piece continues a word.
    """

    k: int
    max_span_words: int
    max_predictions_per_seq: int
    cls_id: int
    sep_id: int
    continues_word: np.ndarray


class PermutationDraws(NamedTuple):
    """All random numbers that an order takes. The first axis of each array is rows.

    Attributes:
      order: `[rows, length]` uint32, by which predicted tokens are ordered.
      single: `[rows, length]` uint32: single tokens are tried in this order.
      words: `[rows, spans]` uint8, words of each span.
      before: `[rows, spans]` float32 from 0 to 1: the share of its context that a span comes after.
    """

    order: np.ndarray
    single: np.ndarray
    words: np.ndarray
    before: np.ndarray


class Permutation(NamedTuple):
    """Which tokens of each row are predicted, and in which order.

    Attributes:
      ranks: `[rows, length]`: 0 for tokens that are not predicted, [CLS] and [SEP] among them; 1, 2, ... for others.
      selected: `[rows, length]` booleans: the predicted ones.
    """

    ranks: np.ndarray
    selected: np.ndarray


def rules_of(k: int, max_span_words: int, max_predictions_per_seq: int, tokenizer: Tokenizer) -> PermutationRules:
    """Returns the rules for the tokens of a tokenizer."""
    special = tokenizer.cls_id, tokenizer.sep_id
    return PermutationRules(k, max_span_words, max_predictions_per_seq, *special, tokenizer.continues_word)


class RandomOrder(BatchTransform):
    """Draws the order in which the tokens of a row are predicted. Each reading of the row draws another order."""

    def __init__(self, rules: PermutationRules) -> None:
        self.rules = rules

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> Batch:
        """Returns the fields of `PermutationDraws`."""
        return draw(rng, rows, length, self.rules)._asdict()

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the `ranks` of `Permutation`, and the predictions."""
        ids = batch["input_ids"]
        ranks, selected = permute(ids, batch["segments"].sum(1), PermutationDraws(**draws), self.rules)
        used = np.arange(self.rules.max_predictions_per_seq) < selected.sum(1)[:, None]
        positions, words = np.zeros((2, *used.shape), np.int32)
        positions[used], words[used] = np.nonzero(selected)[1], ids[selected]
        return {
            "ranks": ranks,
            "word_positions": positions,
            "word_ids": words,
            "word_weights": used.astype(np.float32),
        }


def draw(rng: np.random.Generator, rows: int, length: int, rules: PermutationRules) -> PermutationDraws:
    """Draws what `permute` needs for `[rows, length]` ids."""
    # A span has one word and its context at least.
    spans = rows, 1 + length // (rules.k + 1) if rules.max_span_words else 0
    chances = 1 / np.arange(1, rules.max_span_words + 1)
    chances = np.cumsum(chances[:-1] / chances.sum())
    return PermutationDraws(
        order=rng.integers(2**32, size=(rows, length), dtype=np.uint32),
        single=rng.integers(2**32, size=(rows, length), dtype=np.uint32),
        words=1 + np.searchsorted(chances, rng.random(spans), "right").astype(np.uint8),
        before=rng.random(spans, np.float32),
    )


def permute(ids: np.ndarray, sizes: np.ndarray, draws: PermutationDraws, rules: PermutationRules) -> Permutation:
    """Chooses one in `rules.k` of each row's tokens, at least one, and the order in which they are predicted.

    [CLS] and [SEP] count as tokens, but are never predicted, and no span reaches across one.

    Args:
      ids: `[rows, length]`, padded.
      sizes: `[rows]`, tokens of each row.
    """
    allowed = (ids != rules.cls_id) & (ids != rules.sep_id)
    allowed &= np.arange(ids.shape[1]) < np.asarray(sizes)[:, None]
    wanted = np.clip(np.rint(sizes / rules.k), 1, rules.max_predictions_per_seq).astype(np.int64)
    wanted = np.minimum(wanted, allowed.sum(1))
    selected = _select_spans(allowed, rules.continues_word[ids], wanted, draws, rules.k)

    lacking = wanted - selected.sum(1)
    _put(selected, first_allowed(draws.single, allowed & ~selected, int(lacking.max(initial=0))), lacking, True)
    ranks, most = np.zeros(ids.shape, np.int32), int(wanted.max(initial=0))
    _put(ranks, first_allowed(draws.order, selected, most), wanted, 1 + np.arange(most))
    return Permutation(ranks, selected)


def _put(array: np.ndarray, columns: np.ndarray, counts: np.ndarray, values) -> None:
    """Writes values to the first `counts` `[rows]` of the columns `[rows, most]` of each row."""
    used = np.arange(columns.shape[1]) < counts[:, None]
    array[np.nonzero(used)[0], columns[used].astype(np.intp)] = np.broadcast_to(values, used.shape)[used]


def _select_spans(allowed, continues, wanted, draws: PermutationDraws, k: int) -> np.ndarray:
    """Selects spans of whole words, as many as `wanted` tokens of each row have room for; `[rows, length]` booleans."""
    rows, length = allowed.shape
    inner = np.zeros((rows, length + 1), bool)  # not the first token of its word; a special token ends a word
    inner[:, 1:-1] = allowed[:, 1:] & allowed[:, :-1] & continues[:, 1:]
    begins = np.pad(allowed, ((0, 0), (0, 1))) & ~inner
    next_word, next_end = _next(begins), _next(~inner)

    row, edges = np.arange(rows), np.zeros((rows, length + 1), np.int8)
    place, left = np.zeros(rows, np.int64), wanted.copy()
    for words, before in zip(draws.words.T.astype(np.int64), draws.before.T):
        if not ((place < length) & (left > 0)).any():
            break
        context = k * words
        skipped = np.minimum((before * context).astype(np.int64), context - 1)
        begin = end = next_word[row, np.minimum(place + skipped, length)]
        goes_on = begin < length
        for word in range(int(words.max())):
            following = next_end[row, np.minimum(end + 1, length)]
            goes_on = goes_on & (word < words) & begins[row, end] & (following - begin <= left)
            end = np.where(goes_on, following, end)
        np.add.at(edges, (row, begin), end > begin)
        np.subtract.at(edges, (row, end), end > begin)
        left -= end - begin
        place = np.where(end > begin, end + context - skipped, length)  # the next word has too many tokens
    return np.cumsum(edges[:, :-1], axis=1) > 0


def _next(which: np.ndarray) -> np.ndarray:
    """Returns the first column from each one on that is of these, or the last one: `[rows, columns]`."""
    last = which.shape[1] - 1
    places = np.where(which, np.arange(last + 1), last)
    return np.minimum.accumulate(places[:, ::-1], axis=1)[:, ::-1]
