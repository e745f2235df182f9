"""Next words, by a model whose tokens see only those before them (left-to-right; Devlin et al. 2019, section 5.1)."""

import functools

from bertjax.objectives.parts.words import addition_of, next_words, predicting, validate_unmasked

TITLE = "next words"
OBJECTIVE = predicting(
    TITLE,
    "next",
    functools.partial(validate_unmasked, TITLE),
    words_per_sequence=lambda config, stage: stage.length - 1,
    words_per_row=lambda config, stage, sequences: stage.length - 1,
    addition=addition_of(next_words),
)
