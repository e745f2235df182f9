"""Masks tokens for masked-language-model training (Devlin et al. 2019, section 3.1).

All random numbers are drawn first, as arrays by row, so that a row's mask does not depend on the rows beside it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from bertjax.text.tokenizer import Tokenizer

# Lengths of spans, in words: geometric, cut off at 10; 3.8 on average (Joshi et al. 2020, section 3.1).
SPAN_PROB, MAX_SPAN_WORDS = 0.2, 10
SPAN_LENGTHS = SPAN_PROB * (1 - SPAN_PROB) ** np.arange(MAX_SPAN_WORDS)
SPAN_LENGTHS /= SPAN_LENGTHS.sum()


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
      order: `[rows, length]` uint32: tokens, words or beginnings of spans are selected in this order.
      words: `[rows, max_predictions_per_seq]` words of the first, second, ... span; `[rows, 0]` without spans.
      fates: `[rows, max_predictions_per_seq]` float32 from 0 to 1: what becomes of each selected token.
      pieces: `[rows, max_predictions_per_seq]` int32, random pieces.
    """

    order: np.ndarray
    words: np.ndarray
    fates: np.ndarray
    pieces: np.ndarray

    def of_rows(self, rows) -> "Draws":
        """Returns the draws of some rows: a slice, indices or booleans."""
        return Draws(*(x[rows] for x in self))


def draw(rng: np.random.Generator, rows: int, length: int, rules: Rules) -> Draws:
    selected = (rows, rules.max_predictions_per_seq)
    order = rng.integers(2**32, size=(rows, length), dtype=np.uint32)
    chance = rng.random((rows, rules.max_predictions_per_seq if rules.spans else 0), np.float32)
    return Draws(
        order=order,
        words=1 + np.searchsorted(np.cumsum(SPAN_LENGTHS[:-1]), chance, "right"),
        fates=rng.random(selected, np.float32),
        pieces=rng.integers(rules.vocab_size, size=selected, dtype=np.int32),
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
        leader = None
    else:
        selected, counts, leader = _select_words(allowed, rules.continues_word[ids], wanted, draws, rules.spans)

    used = np.arange(rules.max_predictions_per_seq, dtype=np.int32) < counts[:, None]
    found, fates = ids.ravel()[selected], draws.fates[used]
    if rules.spans:
        fates = fates[leader]
    positions, labels = np.zeros(used.shape, ids.dtype), np.zeros(used.shape, ids.dtype)
    positions[used], labels[used] = selected % length, found

    to_mask, to_random, _ = rules.split
    masked = ids.copy()
    changed = np.where(fates < to_mask, rules.mask_id, np.where(fates < to_mask + to_random, draws.pieces[used], found))
    masked.ravel()[selected] = changed
    return Masking(masked, positions, labels, counts)


NONE = np.uint32(2**32 - 1)


def _first(order: np.ndarray, allowed: np.ndarray, most: int) -> np.ndarray:
    """The columns of the `most` first allowed elements of each row, in this order: `[rows, most]`, padded with `NONE`.

    Order and column are sorted as one number, which is several times as fast as `np.argsort`.
    """
    columns = np.uint32((1 << (order.shape[1] - 1).bit_length()) - 1)
    keys = (order >> 1) & ~columns
    keys |= np.arange(order.shape[1], dtype=np.uint32)
    keys[~allowed] = NONE
    if most < keys.shape[1]:
        keys.partition(most, axis=1)
        keys = keys[:, :most]
    keys.sort(axis=1)
    return np.where(keys == NONE, NONE, keys & columns)


def _select_tokens(allowed, wanted, draws) -> tuple[np.ndarray, np.ndarray]:
    """Selects `wanted` tokens a row: their indices in the flattened rows, ascending, and the number of each row."""
    rows, length = allowed.shape
    first = _first(draws.order, allowed, min(int(wanted.max(initial=1)), length))
    first[np.arange(first.shape[1], dtype=np.int32) >= wanted[:, None]] = NONE
    first.sort(axis=1)
    used = first != NONE
    first += np.arange(0, rows * length, length, dtype=np.uint32)[:, None]
    return first[used].astype(np.intp), used.sum(1)


def _select_words(allowed, continues, wanted, draws, spans):
    """Selects words, or spans of them, of at most `wanted` tokens a row.

    Returns the same as `_select_tokens`, and for each token the first one of its span, by its place in the list.
    """
    rows, length = allowed.shape
    inner = np.zeros(allowed.shape, bool)  # not the first of its word; a special token ends a word
    inner[:, 1:] = allowed[:, 1:] & allowed[:, :-1] & continues[:, 1:]
    begins = allowed & ~inner
    # Words are numbered through all rows: word w has the tokens starts[w] to ends[w] of the flattened rows.
    edges = np.append(np.flatnonzero(~inner), allowed.size)
    is_word = begins.ravel()[edges[:-1]]
    starts, ends = edges[:-1][is_word], edges[1:][is_word]
    number = np.cumsum(begins, dtype=np.int32) - 1  # of the word that begins at a token

    width = MAX_SPAN_WORDS if spans else 1
    # The words after a word up to the next special token
    broken = np.append((starts[1:] != ends[:-1]) | (starts[1:] % length == 0), True)
    run_end = np.flatnonzero(broken)[np.cumsum(broken) - broken] + 1

    sizes = np.append(ends - starts, np.zeros(width, int))
    total = np.append(0, np.cumsum(sizes))
    taken, heads = np.zeros(len(sizes), bool), np.zeros(len(sizes), bool)
    left = wanted.copy()
    order = _first(draws.order, begins, int(begins.sum(1).max(initial=0)))
    active, spans_of = np.arange(rows), np.zeros(rows, int)
    step = np.arange(width)
    for column in order.T:
        active = active[(left[active] > 0) & (column[active] != NONE)]
        if not len(active):
            break
        place = active * length + column[active].astype(np.intp)
        word = number[place]
        window = word[:, None] + step
        many = draws.words[active, spans_of[active]] if spans else 1
        fits = ~taken[window] & (total[window + 1] - total[word][:, None] <= left[active][:, None])
        fits &= window < np.minimum(run_end[word], word + many)[:, None]
        fits = np.logical_and.accumulate(fits, axis=1)
        taken[window[fits]] = True
        heads[word[fits[:, 0]]] = True
        spans_of[active] += fits[:, 0]
        left[active] -= (sizes[window] * fits).sum(1).astype(np.int32)

    chosen = np.flatnonzero(taken)
    many = sizes[chosen]
    before = np.cumsum(many) - many
    tokens = np.repeat(starts[chosen] - before, many) + np.arange(many.sum())
    leader = np.maximum.accumulate(np.repeat(np.where(heads[chosen], before, 0), many))
    return tokens, wanted - left, leader
