"""Both neighbours of each word, by a model some of whose states see those before it and others those after it (ELMo;
Peters et al. 2018, section 3.1)."""

import functools

import numpy as np

from bertjax.objectives.parts.words import addition_of, next_words, predicting, validate_unmasked

TITLE = "next and previous words"


def neighbours(ids: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `next_words`, then the previous ones: the token two places on predicts the same word from the other side.

    [CLS] is not predicted. In each half of the arrays, what is not used is at the end.
    """
    positions, words, used = next_words(ids, sizes)
    before = np.where(used, positions + 2, 0)
    return np.concatenate([positions, before], 1), np.tile(words, 2), np.tile(used, 2)


OBJECTIVE = predicting(
    TITLE,
    "bidirectional",
    functools.partial(validate_unmasked, TITLE),
    words_per_sequence=lambda config, stage: 2 * (stage.length - 1),
    addition=addition_of(neighbours),
)
