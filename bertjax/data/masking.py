"""Masks tokens for masked-language-model training (Devlin et al. 2019, section 3.1)."""

from typing import NamedTuple

import numpy as np


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


def mask_tokens(
    ids: np.ndarray,
    sizes: np.ndarray,
    special: np.ndarray,
    rng: np.random.Generator,
    *,
    vocab_size: int,
    mask_id: int,
    masked_lm_prob: float = 0.15,
    max_predictions_per_seq: int = 20,
    continues_word: np.ndarray | None = None,
) -> Masking:
    """Masks `masked_lm_prob` of each row's tokens, at least one and at most `max_predictions_per_seq`.

    Of the selected tokens 80 % become [MASK], 10 % a random piece, and 10 % keep their id. As in Google's
    create_masked_lm_predictions, special tokens count towards the total length but are never selected.

    Args:
      ids: `[rows, length]`, padded.
      sizes: `[rows]`, tokens of each row.
      special: `[rows, length]` booleans: True at [CLS] and [SEP].
      continues_word: `[vocab_size]` booleans. If given, masks whole words: all pieces of a word are selected together,
        and words that would exceed the limit are skipped.
    """
    allowed = ~special & (np.arange(ids.shape[1]) < sizes[:, None])
    wanted = np.clip(np.rint(sizes * masked_lm_prob).astype(int), 1, max_predictions_per_seq)
    order = rng.random(ids.shape, np.float32)
    if continues_word is None:
        chosen = _first_tokens(order, allowed, wanted)
    else:
        chosen = _first_words(order, allowed, continues_word[ids], wanted)

    counts = chosen.sum(1)
    used = np.arange(max_predictions_per_seq) < counts[:, None]
    rows, places = np.nonzero(chosen)
    positions, labels = np.zeros(used.shape, ids.dtype), np.zeros(used.shape, ids.dtype)
    positions[used], labels[used] = places, ids[rows, places]

    draw = rng.random(len(rows), np.float32)
    random_ids = rng.integers(vocab_size, size=len(rows))
    masked = ids.copy()
    masked[rows, places] = np.where(draw < 0.8, mask_id, np.where(draw < 0.9, labels[used], random_ids))
    return Masking(masked, positions, labels, counts)


def _first_tokens(order, allowed, wanted) -> np.ndarray:
    """Booleans `[rows, length]`: True for the `wanted` tokens of each row that are allowed and first in `order`."""
    most = min(int(wanted.max(initial=1)), order.shape[1])
    keys = np.where(allowed, order, 2)
    first = np.argpartition(keys, most - 1, axis=1)[:, :most]
    found = np.take_along_axis(keys, first, axis=1)
    first = np.take_along_axis(first, np.argsort(found, axis=1), axis=1)
    chosen = np.zeros(order.shape, bool)
    np.put_along_axis(chosen, first, np.arange(most) < wanted[:, None], axis=1)
    return chosen & allowed


def _first_words(order, allowed, continues, wanted) -> np.ndarray:
    """The same for whole words, at most `wanted` tokens of each row: a word over the limit is passed over."""
    rows, places = np.arange(len(order))[:, None], np.arange(order.shape[1])
    after_allowed = np.pad(allowed, ((0, 0), (1, 0)))[:, :-1]  # a special token ends a word
    begins = allowed & ~(continues & after_allowed)
    word = np.maximum.accumulate(np.where(begins, places, 0), axis=1)  # where the word of a token begins
    sizes = np.zeros(order.shape, int)
    np.add.at(sizes, (rows, word), allowed)

    words = np.argsort(np.where(begins, order, 2), axis=1)[:, : int(begins.sum(1).max(initial=0))]
    chosen, counts = np.zeros(order.shape, bool), np.zeros(len(order), int)
    for each in words.T:  # of every row
        fits = begins[rows[:, 0], each] & (counts + sizes[rows[:, 0], each] <= wanted)
        chosen[rows[:, 0], each] = fits
        counts += np.where(fits, sizes[rows[:, 0], each], 0)
        if (counts == wanted).all():
            break
    return chosen[rows, word] & allowed
