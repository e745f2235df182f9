"""Causal language modelling: each token predicts the next one, and sees only the tokens before it."""

from typing import TYPE_CHECKING

import numpy as np

from bertjax.config.stages import Stage
from bertjax.data.batch import FOLLOWING, Batch
from bertjax.data.loading.transforms import BatchTransform
from bertjax.objectives.parts.words import WordMetrics, WordObjective, next_words, validate_unmasked, word_arrays

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from bertjax.text.tokenizer import Tokenizer


class NextWordsOfRows(BatchTransform):
    """Adds the next tokens of rows that are read by themselves."""

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the predictions, see `next_words`."""
        return word_arrays(*next_words(batch["input_ids"], batch["segments"].sum(1)))


class NextWordsOfStream(BatchTransform):
    """Adds the next tokens of rows that continue in the next step: the last token predicts the first one there."""

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns a prediction for each token."""
        ids, following = batch["input_ids"], batch[FOLLOWING]
        used = np.concatenate([batch["segments"][:, 1:] > 0, following[:, None] >= 0], axis=1)
        used &= batch["segments"] > 0
        words = np.concatenate([ids[:, 1:], following[:, None]], axis=1)
        place = np.arange(ids.shape[1], dtype=ids.dtype)
        return word_arrays(np.where(used, place, 0), np.where(used, words, 0), used)


class NextWords(WordObjective):
    """Predicts the next token of each token (left-to-right; Devlin et al. 2019, section 5.1)."""

    lm_type = "causal"
    continues = True
    metrics = WordMetrics("next words")

    def predictions_per_sequence(self, config: "ConfigDict", stage: Stage) -> int:
        """Returns one prediction per token; the last token of a row predicts only in a stream."""
        return stage.length if config.data.stream else stage.length - 1

    def predictions_per_row(self, config: "ConfigDict", stage: Stage, sequences: int) -> int:
        """Returns the number of the tokens, whichever sequences share the row."""
        return stage.length - 1

    def transform(self, config: "ConfigDict", stage: Stage, tokenizer: "Tokenizer | None") -> BatchTransform:
        """Returns the transform that adds next tokens."""
        return NextWordsOfStream() if config.data.stream else NextWordsOfRows()

    def validate(self, config: "ConfigDict") -> None:
        """Checks that the encoder is causal, and that nothing is masked."""
        super().validate(config)
        validate_unmasked(self.metrics.title, config)


OBJECTIVE = NextWords()
