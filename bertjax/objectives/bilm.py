"""Bidirectional language modelling (ELMo; Peters et al. 2018, section 3.1).

Two stacks of layers read the text in opposite directions, and predict the next token and the previous token.
"""

from typing import TYPE_CHECKING

import numpy as np

from bertjax.config.stages import Stage
from bertjax.data.batch import Batch
from bertjax.data.loading.transforms import BatchTransform
from bertjax.objectives.parts.words import WordMetrics, WordObjective, next_words, validate_unmasked, word_arrays

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from bertjax.text.tokenizer import Tokenizer


def neighbours(ids: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the predictions of `next_words`, and then the predictions of the same tokens from the other side.

    The token two places further predicts the same token. [CLS] is not predicted. In each half of the arrays, unused
    places are at the end.
    """
    positions, words, used = next_words(ids, sizes)
    before = np.where(used, positions + 2, 0)
    return np.concatenate([positions, before], 1), np.tile(words, 2), np.tile(used, 2)


class NeighboursOfRows(BatchTransform):
    """Adds the next and the previous tokens."""

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the predictions, see `neighbours`."""
        return word_arrays(*neighbours(batch["input_ids"], batch["segments"].sum(1)))


class NeighbouringWords(WordObjective):
    """Predicts the next token and the previous token of each token."""

    lm_type = "bidirectional"
    metrics = WordMetrics("next and previous words")

    def predictions_per_sequence(self, config: "ConfigDict", stage: Stage) -> int:
        """Returns two predictions per token."""
        return 2 * (stage.length - 1)

    def transform(self, config: "ConfigDict", stage: Stage, tokenizer: "Tokenizer | None") -> BatchTransform:
        """Returns the transform that adds the neighbouring tokens."""
        return NeighboursOfRows()

    def validate(self, config: "ConfigDict") -> None:
        """Checks that the encoder reads both directions apart, and that nothing is masked."""
        super().validate(config)
        validate_unmasked(self.metrics.title, config)


OBJECTIVE = NeighbouringWords()
