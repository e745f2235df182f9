"""Masks tokens for masked-language-model training (Devlin et al. 2019, section 3.1)."""

from typing import NamedTuple

import numpy as np


class Masking(NamedTuple):
    """Masked token ids `[length]`; `positions` and `labels` `[predictions]` in ascending order of position."""

    ids: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


def mask_tokens(
    ids: np.ndarray,
    special: np.ndarray,
    rng: np.random.Generator,
    *,
    vocab_size: int,
    mask_id: int,
    masked_lm_prob: float = 0.15,
    max_predictions_per_seq: int = 20,
    continues_word: np.ndarray | None = None,
) -> Masking:
    """Selects `masked_lm_prob` of the tokens, at least one and at most `max_predictions_per_seq`, and masks them.

    Of the selected tokens 80 % become [MASK], 10 % a random piece, and 10 % keep their id. As in Google's
    create_masked_lm_predictions, special tokens count towards the total length but are never selected.

    Args:
      ids: `[length]`, without padding.
      special: `[length]` booleans: True at [CLS] and [SEP].
      continues_word: `[vocab_size]` booleans. If given, masks whole words: all pieces of a word are selected together,
        and words that would exceed the limit are skipped.
    """
    candidates = np.flatnonzero(~special)
    wanted = min(max_predictions_per_seq, max(1, round(len(ids) * masked_lm_prob)))
    if continues_word is None:
        chosen = rng.permutation(candidates)[:wanted]
    else:
        chosen = _choose_words(candidates, continues_word[ids[candidates]], wanted, rng)
    positions = np.sort(chosen)

    masked, labels = ids.copy(), ids[positions]
    draw = rng.random(len(positions))
    random_ids = rng.integers(vocab_size, size=len(positions))
    masked[positions] = np.where(draw < 0.8, mask_id, np.where(draw < 0.9, labels, random_ids))
    return Masking(masked, positions, labels)


def _choose_words(candidates, continues, wanted: int, rng) -> np.ndarray:
    """Returns the positions of randomly chosen whole words, at most `wanted` positions."""
    follows = np.diff(candidates, prepend=-2) == 1  # a special token ends a word
    words = np.split(candidates, np.flatnonzero(~(continues & follows)))[1:]
    chosen = []
    for i in rng.permutation(len(words)):
        if len(chosen) + len(words[i]) <= wanted:
            chosen.extend(words[i])
        if len(chosen) == wanted:
            break
    return np.array(chosen, dtype=np.int64)
