"""Both neighbours of each word, by a model some of whose states see those before it and others those after it (ELMo;
Peters et al. 2018, section 3.1)."""

import functools

import numpy as np

from bertjax.objectives import Objective, words

TITLE = "next and previous words"


def _add(batch, drawn) -> dict:
    """The next words, then the previous ones: the token two places on predicts the same word from the other side.

    [CLS] is not predicted. In each half of the arrays, what is not used is at the end.
    """
    positions, ids, used = words.next_words(batch["input_ids"], batch["segments"].sum(1))
    return {
        "word_positions": np.concatenate([positions, np.where(used, positions + 2, 0)], 1),
        "word_ids": np.tile(ids, 2),
        "word_weights": np.tile(used, 2).astype(np.float32),
    }


def _addition(config, stage, tokenizer):
    from bertjax.data.batches.additions import Addition

    return Addition(_add)


def _validate(config) -> None:
    words.validate_family(config, "neighbours")
    words.validate_unmasked(config, TITLE)


OBJECTIVE = Objective(
    loss=words.loss,
    scores=words.scores,
    report=functools.partial(words.report, TITLE),
    heads=words.heads,
    weights=words.weights,
    total=words.total,
    baselines=words.baselines,
    statistics=words.UNIGRAM,
    words_per_sequence=lambda config, stage: 2 * (stage.length - 1),
    addition=_addition,
    flops=words.flops,
    validate=_validate,
    plots=words.PLOTS,
)
