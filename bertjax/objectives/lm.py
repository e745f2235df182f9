"""Next words, by a model whose tokens see only those before them (left-to-right; Devlin et al. 2019, section 5.1)."""

import functools

import numpy as np

from bertjax.objectives.parts.words import addition_of, next_words, predicting, validate_unmasked

TITLE = "next words"


def _addition(config, stage, tokenizer):
    from bertjax.data.loading.transforms import Addition

    return Addition(_of_stream) if config.data.stream else addition_of(next_words)(config, stage, tokenizer)


def _of_stream(batch, drawn):
    """All tokens predict the next one, the last of a row the one that begins the step after."""
    from bertjax.data.loading.transforms import FOLLOWING

    ids, following = batch["input_ids"], batch[FOLLOWING]
    used = np.concatenate([batch["segments"][:, 1:] > 0, following[:, None] >= 0], axis=1)
    used &= batch["segments"] > 0
    words = np.concatenate([ids[:, 1:], following[:, None]], axis=1)
    place = np.arange(ids.shape[1], dtype=ids.dtype)
    found = {"word_positions": np.where(used, place, 0), "word_ids": np.where(used, words, 0)}
    return found | {"word_weights": used.astype(np.float32)}


OBJECTIVE = predicting(
    TITLE,
    "causal",
    functools.partial(validate_unmasked, TITLE),
    words_per_sequence=lambda config, stage: stage.length if config.data.stream else stage.length - 1,
    words_per_row=lambda config, stage, sequences: stage.length - 1,
    addition=_addition,
    goes_on=True,
)
