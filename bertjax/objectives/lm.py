"""Causal language modelling: each position predicts the next token from the tokens up to the position."""

from typing import TYPE_CHECKING

import numpy as np

from bertjax.config.stages import Stage
from bertjax.data.batch import FOLLOWING, Batch
from bertjax.data.loading.transforms import BatchTransform
from bertjax.objectives.parts import words

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from bertjax.text.tokenizer import Tokenizer


class NextTokens(BatchTransform):
    """Adds the next token of each token to a batch. The rows of different steps are independent."""

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the predictions, see `next_tokens`."""
        return words.word_arrays(*words.next_tokens(batch["input_ids"], batch["segments"].sum(1)))


class StreamNextTokens(BatchTransform):
    """Adds the next token of each token to a batch of a stream.

    A row continues in the next step, so that the last token predicts the first token of the next step.
    """

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns a prediction for each token, `[rows, length]`."""
        ids, following = batch["input_ids"], batch[FOLLOWING]  # `following` is -1 at the end of a stream
        is_valid = np.concatenate([batch["segments"][:, 1:] > 0, following[:, None] >= 0], axis=1)
        is_valid &= batch["segments"] > 0
        tokens = np.concatenate([ids[:, 1:], following[:, None]], axis=1)
        positions = np.arange(ids.shape[1], dtype=ids.dtype)
        return words.word_arrays(np.where(is_valid, positions, 0), np.where(is_valid, tokens, 0), is_valid)


class CausalLM(words.WordObjective):
    """Predicts the next token of each token (left-to-right; Devlin et al. 2019, section 5.1)."""

    lm_type = "causal"
    continues = True
    required_values = words.NO_MASKS_AND_PAIRS
    metrics = words.WordMetrics("next words")

    def predictions_per_sequence(self, config: "ConfigDict", stage: Stage) -> int:
        """Returns one prediction per position. The last position has a next token only in a stream."""
        return stage.length if config.data.stream else stage.length - 1

    def predictions_per_row(self, config: "ConfigDict", stage: Stage, sequences: int) -> int:
        """Returns one prediction per position of the row, for any number of sequences."""
        return stage.length - 1

    def transform(self, config: "ConfigDict", stage: Stage, tokenizer: "Tokenizer | None") -> BatchTransform:
        """Returns the transform that adds next tokens."""
        return StreamNextTokens() if config.data.stream else NextTokens()


OBJECTIVE = CausalLM()
