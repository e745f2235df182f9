"""The masked-LM task: which tokens are hidden, and behind what (Devlin et al. 2019, section 3.1)."""

from typing import NamedTuple

import numpy as np


class Masking(NamedTuple):
    """A sequence with hidden tokens `[length]`; `positions` and `labels` `[predictions]`, by rising position."""

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
    """Hides `masked_lm_prob` of the tokens, at least one and at most `max_predictions_per_seq`.

    Of the hidden tokens 80 % become [MASK], 10 % a random piece and 10 % stay (create_masked_lm_predictions in
    create_pretraining_data.py, which also counts the special tokens into the 15 % but never hides one).

    Args:
      ids: `[length]`, without padding.
      special: `[length]` booleans: [CLS] and [SEP].
      continues_word: `[vocab_size]` booleans. Where given, all pieces of a word are hidden together, and a word that
        would not fit under the limit is passed over.
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
    """Positions of whole words in random order, as many as fit into `wanted`."""
    follows = np.diff(candidates, prepend=-2) == 1  # a word does not reach across a special token
    words = np.split(candidates, np.flatnonzero(~(continues & follows)))[1:]
    chosen = []
    for i in rng.permutation(len(words)):
        if len(chosen) + len(words[i]) <= wanted:
            chosen.extend(words[i])
        if len(chosen) == wanted:
            break
    return np.array(chosen, dtype=np.int64)
