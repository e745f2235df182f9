"""Masked language modelling (Devlin et al. 2019, section 3.1)."""

from typing import TYPE_CHECKING

from bertjax.config.stages import Stage
from bertjax.objectives.parts.words import WordMetrics, WordObjective, predictions_of_rows

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from bertjax.data.loading.transforms import BatchTransform
    from bertjax.text.tokenizer import Tokenizer


class MaskedWords(WordObjective):
    """Predicts masked tokens. Records hold the masks with static masking; otherwise hosts mask when they read."""

    lm_type = "masked"
    fills_masks = True
    metrics = WordMetrics("masked words")

    def predictions_per_sequence(self, config: "ConfigDict", stage: Stage) -> int:
        """Returns the field of the stage."""
        return stage.max_predictions_per_seq

    def predictions_per_row(self, config: "ConfigDict", stage: Stage, sequences: int) -> int:
        """Returns the number for `data.masked_lm_prob`."""
        return predictions_of_rows(config.data.masked_lm_prob, stage, sequences)

    def transform(self, config: "ConfigDict", stage: Stage, tokenizer: "Tokenizer | None") -> "BatchTransform | None":
        """Returns dynamic masking; None with static masking."""
        if config.data.masking == "static":
            return None
        if tokenizer is None:
            raise ValueError("dynamic masking needs a tokenizer")
        from bertjax.data.loading.masking import DynamicMasking, rules_of

        return DynamicMasking(rules_of(config.data, tokenizer, stage.max_predictions_per_seq))


OBJECTIVE = MaskedWords()
