"""Masked language modelling (Devlin et al. 2019, section 3.1)."""

from typing import TYPE_CHECKING

from bertjax.config.stages import Stage
from bertjax.objectives.parts.words import WordMetrics, WordObjective, max_predictions_of_row

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from bertjax.data.loading.transforms import BatchTransform
    from bertjax.text.tokenizer import Tokenizer


class MaskedLM(WordObjective):
    """Predicts masked tokens.

    With static masking, the records hold the masks. With dynamic masking, a transform masks each batch on the host.
    """

    lm_type = "masked"
    fills_masks = True
    metrics = WordMetrics("masked words")

    def predictions_per_sequence(self, config: "ConfigDict", stage: Stage) -> int:
        """Returns `max_predictions_per_seq` of the stage."""
        return stage.max_predictions_per_seq

    def predictions_per_row(self, config: "ConfigDict", stage: Stage, sequences: int) -> int:
        """Returns the maximum if the fraction `data.masked_lm_prob` of each sequence is masked."""
        return max_predictions_of_row(config.data.masked_lm_prob, stage, sequences)

    def transform(self, config: "ConfigDict", stage: Stage, tokenizer: "Tokenizer | None") -> "BatchTransform | None":
        """Returns the transform for dynamic masking; None with static masking."""
        if config.data.masking == "static":
            return None
        if tokenizer is None:
            raise ValueError("tokenizer is None: dynamic masking needs the tokenizer of the records")
        from bertjax.data.loading.masking import masking_of

        return masking_of(config.data, tokenizer, stage.max_predictions_per_seq)


OBJECTIVE = MaskedLM()
