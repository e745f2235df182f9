"""Masked words (Devlin et al. 2019, section 3.1)."""

from bertjax.objectives.parts.words import predicting, words_of_rows


def _addition(config, stage, tokenizer):
    if config.data.masking == "static":
        return None
    if tokenizer is None:
        raise ValueError("dynamic masking needs a tokenizer")
    from bertjax.data.loading.masking import masks, rules_of

    return masks(rules_of(config.data, tokenizer, stage.max_predictions_per_seq))


OBJECTIVE = predicting(
    "masked words",
    "masked",
    words_per_sequence=lambda config, stage: stage.max_predictions_per_seq,
    words_per_row=lambda config, stage, sequences: words_of_rows(config.data.masked_lm_prob, stage, sequences),
    addition=_addition,
    fills_masks=True,
)
