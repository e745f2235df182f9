"""Next words, by a model whose tokens see only those before them (left-to-right; Devlin et al. 2019, section 5.1)."""

import functools

import numpy as np

from bertjax.objectives import Objective, words

TITLE = "next words"


def _add(batch, drawn) -> dict:
    positions, ids, used = words.next_words(batch["input_ids"], batch["segments"].sum(1))
    return {"word_positions": positions, "word_ids": ids, "word_weights": used.astype(np.float32)}


def _addition(config, stage, tokenizer):
    from bertjax.data.batches.additions import Addition

    return Addition(_add)


def _validate(config) -> None:
    words.validate_family(config, "next")
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
    words_per_sequence=lambda config, stage: stage.length - 1,
    words_per_row=lambda config, stage, sequences: stage.length - 1,
    addition=_addition,
    flops=words.flops,
    validate=_validate,
    plots=words.PLOTS,
)
