"""Bidirectional language modelling (ELMo; Peters et al. 2018, section 3.1).

The forward layers predict the next token of each token, the backward layers the previous token.
"""

from typing import TYPE_CHECKING

import numpy as np

from bertjax.config.stages import Stage
from bertjax.data.batch import Batch
from bertjax.data.loading.transforms import BatchTransform
from bertjax.objectives.parts import words

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from bertjax.text.tokenizer import Tokenizer


def bidirectional_targets(ids: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the arguments of `word_arrays` for both directions, `[rows, 2 * (length - 1)]`.

    The first half are the results of `next_tokens`: position p predicts token p + 1. In the second half, position p + 2
    predicts token p + 1 from the other direction. [CLS] is not predicted. Padding is at the end of each half.

    Args:
      ids: `[rows, length]`, padded.
      sizes: `[rows]`, the number of tokens of each row.
    """
    positions, tokens, is_valid = words.next_tokens(ids, sizes)
    backward_positions = np.where(is_valid, positions + 2, 0)
    return np.concatenate([positions, backward_positions], 1), np.tile(tokens, 2), np.tile(is_valid, 2)


class NextAndPreviousTokens(BatchTransform):
    """Adds the next and the previous token of each token to a batch."""

    def __call__(self, batch: Batch, draws: Batch) -> Batch:
        """Returns the predictions, see `bidirectional_targets`."""
        return words.word_arrays(*bidirectional_targets(batch["input_ids"], batch["segments"].sum(1)))


class BidirectionalLM(words.WordObjective):
    """Predicts the next token and the previous token of each token."""

    lm_type = "bidirectional"
    required_values = words.NO_MASKS_AND_PAIRS
    metrics = words.WordMetrics("next and previous words")

    def predictions_per_sequence(self, config: "ConfigDict", stage: Stage) -> int:
        """Returns two predictions per position, without the last position."""
        return 2 * (stage.length - 1)

    def transform(self, config: "ConfigDict", stage: Stage, tokenizer: "Tokenizer | None") -> BatchTransform:
        """Returns the transform that adds the neighbouring tokens."""
        return NextAndPreviousTokens()


OBJECTIVE = BidirectionalLM()
