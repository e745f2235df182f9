"""Masked words (Devlin et al. 2019, section 3.1)."""

import math

from bertjax.objectives.parts.words import predicting


def _addition(config, stage, tokenizer):
    if config.data.masking == "static":
        return None
    if tokenizer is None:
        raise ValueError("dynamic masking needs a tokenizer")
    from bertjax.data.batches.masking import masks, rules_of

    return masks(rules_of(config.data, tokenizer, stage.max_predictions_per_seq))


def _words_per_row(config, stage, sequences: int) -> int:
    # The number of masked tokens in a sequence is rounded, and at least one; the shortest sequence has three tokens.
    wanted = config.data.masked_lm_prob * stage.length
    rounded = math.ceil(wanted + sequences / 2)
    at_least_one = math.floor(wanted + sequences * (1 - 3 * config.data.masked_lm_prob))
    return min(max(rounded, at_least_one), sequences * stage.max_predictions_per_seq)


OBJECTIVE = predicting(
    "masked words",
    "masked",
    words_per_sequence=lambda config, stage: stage.max_predictions_per_seq,
    words_per_row=_words_per_row,
    addition=_addition,
    fills_masks=True,
)
