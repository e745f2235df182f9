"""Objectives that predict tokens: the loss at `word_positions`, and the unigram baseline."""

import abc
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bertjax.config.limits import require, value_of
from bertjax.config.model_config import BertConfig, Compute
from bertjax.config.stages import Stage
from bertjax.data.batch import WORD_ARRAYS, Batch, BatchSpec, RowSize
from bertjax.models import families
from bertjax.models.family import LmType
from bertjax.objectives.objective import Metrics, Objective, ObjectiveMetrics, Plot
from bertjax.objectives.parsing import OBJECTIVE_OF_LM_TYPE

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from ml_collections import ConfigDict

    from bertjax.objectives.encoded_batch import EncodedBatch

# Logits of more bytes than MOST_BYTES are computed in parts of PART_BYTES, so that they never exist together. The
# backward pass computes them again. The logits of two sequences of 8,192 tokens, of which 30 % are predicted, take a
# GiB. Smaller logits are computed once, which is faster.
MOST_BYTES, PART_BYTES = 1 << 30, 1 << 28


class WordMetrics(ObjectiveMetrics):
    """Loss and accuracy, beside the unigram baseline and the most frequent token.

    Args:
      title: the words of the report for the objective.
    """

    plots = (
        Plot("loss of words", "loss", "unigram_loss", is_main=True),
        Plot("accuracy of words", "accuracy", "{name}_majority", is_main=True),
    )

    def __init__(self, title: str) -> None:
        self.title = title

    def scores(self, name: str, means: Mapping[str, float]) -> dict[str, float]:
        """Returns the loss, the accuracy and the baselines."""
        return {
            f"{name}_loss": means["loss"],
            "unigram_loss": means["unigram_loss"],
            f"{name}_accuracy": means["accuracy"],
            f"{name}_majority": means["majority"],
        }

    def report(self, name: str, scores: Mapping[str, float]) -> list[str]:
        """Returns the lines of all sources, and a line for each source."""
        loss, accuracy, majority = (scores[f"{name}_{metric}"] for metric in ("loss", "accuracy", "majority"))
        unigram = scores["unigram_loss"]
        comparison = f"{abs(unigram - loss):.3f} {'better' if loss < unigram else 'worse'} than it"
        title = f"held-out {self.title}: "
        lines = [
            f"{title}loss {loss:.3f} nats; unigram baseline {unigram:.3f} ({comparison})",
            f"{'':{len(title)}}accuracy {accuracy:.1%}; always the most frequent word {majority:.1%}",
        ]
        for score, loss in scores.items():
            if match := re.fullmatch(rf"{name}_loss \((.*)\)", score):
                accuracy = scores[f"{name}_accuracy ({match[1]})"]
                lines.append(f"{'':{len(title)}}of {match[1]}: loss {loss:.3f}, accuracy {accuracy:.1%}")
        return lines

    def baselines(self, batch: dict, weights: "jax.Array", statistics: "jax.Array") -> Metrics:
        """Returns the loss of the unigram frequencies, and the number of the most frequent token."""
        words = batch["word_ids"]
        return {
            "unigram_loss": -(weights * statistics[words]).sum(),
            "majority": (weights * (words == statistics.argmax())).sum(),
        }

    def statistics_shape(self, config: BertConfig) -> tuple[int, ...]:
        """Returns `[vocab_size]`."""
        return (config.vocab_size,)

    def measure_statistics(self, config: BertConfig, batches: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Returns the unigram log-probabilities of the predicted tokens, with add-one smoothing."""
        counts = np.ones(config.vocab_size, np.int64)
        for batch in batches:
            counts += np.bincount(batch["word_ids"][batch["word_weights"] > 0], minlength=len(counts))
        return np.log(counts / counts.sum()).astype(np.float32)


class WordObjective(Objective):
    """Predicts the tokens at `word_positions` with the output layer of masked language models.

    At most one objective of a sum may predict tokens.

    Attributes:
      lm_type: the way in which the encoder must read a text, see `models.family.ModelFamily.lm_type`.
      fills_masks: whether the model can fill a [MASK] afterwards.
      continues: whether the objective can read a stream of text, whose rows continue in the next step (`data.stream`).
    """

    metrics: ClassVar[WordMetrics]
    lm_type: ClassVar[LmType]
    fills_masks: ClassVar[bool] = False
    continues: ClassVar[bool] = False

    @abc.abstractmethod
    def predictions_per_sequence(self, config: "ConfigDict", stage: Stage) -> int:
        """Returns the most predicted tokens of a sequence."""

    def predictions_per_row(self, config: "ConfigDict", stage: Stage, sequences: int) -> int:
        """Returns the most predicted tokens of a packed row that holds at most `sequences` sequences."""
        return sequences * self.predictions_per_sequence(config, stage)

    def batch_spec(self, config: "ConfigDict", stage: Stage) -> BatchSpec:
        """Returns the arrays of the predictions."""
        return WORD_ARRAYS

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns the output layer of masked language models, for all kinds of language models."""
        from bertjax.nn.heads import MaskedLanguageModelHead

        return {"masked_lm": MaskedLanguageModelHead(config, compute)}

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the cross-entropy and the accuracy."""
        return loss_of_words(encoded, weights)[0]

    def weights(self, batch: dict) -> "jax.Array":
        """Returns the weights of the predictions `[rows, predictions]`."""
        return batch["word_weights"]

    def normalizer(self, weights: "jax.Array") -> "jax.Array":
        """Returns the number of predictions, as `get_masked_lm_output` of Google's run_pretraining.py."""
        return weights.sum() + 1e-5

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the output layer."""
        from bertjax.nn.heads import word_flops

        return word_flops(config, row.predictions)

    def validate(self, config: "ConfigDict") -> None:
        """Checks that the encoder reads a text in the way that the objective needs."""
        lm_type = families.lm_type_of(config)
        remedy = (
            f"a model with these fields of config.model learns words as {OBJECTIVE_OF_LM_TYPE[lm_type]}, not as "
            f"{OBJECTIVE_OF_LM_TYPE[self.lm_type]}"
        )
        require(lm_type == self.lm_type, "objective", config.objective, remedy)


def loss_of_words(
    encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array | None" = None
) -> "tuple[tuple[jax.Array, Metrics], jax.Array | None]":
    """Returns the loss of the predicted tokens, and tokens that are sampled from the predictions.

    Args:
      encoded: the batch, with the output layer `masked_lm`.
      weights: `[rows, predictions]`.
      keys: `[rows]` random keys of the samples; None for no samples.

    Returns:
      The weighted sums of the cross-entropy and of the correct predictions; the samples `[rows, predictions]`, or None.
    """
    import jax.numpy as jnp

    from bertjax.models.heads import word_logits
    from bertjax.objectives.parts.pretraining_model import classified, sample, summed_in_parts

    assert encoded.hidden is not None
    batch, encoder, head = encoded.batch, encoded.encoder, encoded.heads["masked_lm"]
    positions, words, size = batch["word_positions"], batch["word_ids"], head.config.padded_vocab_size

    def read(logits: Any, words: Any, weights: Any, first: Any = 0) -> tuple:
        sums = classified(logits, words, weights, encoded.z_loss)
        return sums, None if keys is None else sample(logits, keys, first * size)

    is_small = positions.size * 4 * size <= MOST_BYTES
    if is_small or encoder.is_initializing() or len(list(encoder.prediction_states(encoded.hidden, positions))) > 1:
        return read(word_logits(encoder, head, encoded.hidden, positions), words, weights)
    module, variables = head.unbind()  # the loop cannot call a bound module
    table, rows = encoder.word_embeddings(), len(positions)

    def read_part(positions: Any, words: Any, weights: Any, columns: Any) -> tuple:
        logits = module.apply(variables, encoded.hidden, positions, table)
        return read(logits, words, weights, columns[0, 0])

    columns = jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape)
    part = max(1, PART_BYTES // (rows * 4 * size))
    return summed_in_parts(read_part, (positions, words, weights, columns), part)


def predictions_of_rows(share: float, stage: Stage, sequences: int) -> int:
    """Returns the most predicted tokens of a packed row.

    Args:
      share: the share of the tokens of each sequence that is predicted.
      stage: the stage.
      sequences: the most sequences of the row.
    """
    # The number of predictions of a sequence is rounded, and at least 1. The shortest sequence has three tokens.
    wanted = share * stage.length
    rounded = math.ceil(wanted + sequences / 2)
    at_least_one = math.floor(wanted + sequences * (1 - 3 * share))
    return min(max(rounded, at_least_one), sequences * stage.max_predictions_per_seq)


def next_words(ids: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the positions that predict a next token, the next tokens, and which exist, `[rows, length - 1]` each.

    Every token predicts the next one, except the token before the [SEP] that closes the row: this [SEP] marks the end
    of the row, not the end of a document.

    Args:
      ids: `[rows, length]`, padded.
      sizes: `[rows]`, tokens of each row.
    """
    place = np.arange(ids.shape[1] - 1, dtype=ids.dtype)
    used = place < sizes[:, None] - 2
    return np.where(used, place, 0), np.where(used, ids[:, 1:], 0), used


def word_arrays(positions: np.ndarray, words: np.ndarray, used: np.ndarray) -> Batch:
    """Returns the arrays of predictions, from positions, tokens and booleans `[rows, predictions]`."""
    return {"word_positions": positions, "word_ids": words, "word_weights": used.astype(np.float32)}


def validate_unmasked(title: str, config: "ConfigDict") -> None:
    """Raises `UserError` if the data has masks or pairs of segments."""
    validate_not_masked(title, config)
    for field, needed in (("data.next_sentence", "none"), ("eval.fill_masks", ())):
        why = f"nothing is masked where {title} are learnt, and there are no pairs; set {needed}"
        require(value_of(config, field) == needed, field, value_of(config, field), why)


def validate_not_masked(title: str, config: "ConfigDict") -> None:
    """Raises `UserError` if the data has masks."""
    for field, needed in (
        ("data.masking", "dynamic"),
        ("data.do_whole_word_mask", False),
        ("data.do_span_mask", False),
    ):
        why = f"nothing is masked where {title} are learnt; set {needed}"
        require(value_of(config, field) == needed, field, value_of(config, field), why)
