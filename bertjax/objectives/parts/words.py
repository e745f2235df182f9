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

# Logits of more than MAX_LOGIT_BYTES are computed in chunks of CHUNK_BYTES. The backward pass recomputes the chunks.
# The logits of two sequences of 8,192 tokens, of which 30 % are predicted, take 1 GiB. Smaller logits are computed
# once, which is faster.
MAX_LOGIT_BYTES, CHUNK_BYTES = 1 << 30, 1 << 28
# `WordObjective.required_values` of objectives without masks, and without masks and pairs of segments.
NO_MASKS = {"data.masking": "dynamic", "data.do_whole_word_mask": False, "data.do_span_mask": False}
NO_MASKS_AND_PAIRS = NO_MASKS | {"data.next_sentence": "none", "eval.fill_masks": ()}


class WordMetrics(ObjectiveMetrics):
    """Loss and accuracy, beside the unigram baseline and the most frequent token.

    Args:
      title: the name of the predictions in the report, such as "masked words".
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
        comparison = f"{abs(unigram - loss):.3f} nats {'better' if loss < unigram else 'worse'}"
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
        """Returns the loss of the unigram baseline, and the count of the most frequent token."""
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
    """Predicts the tokens at `word_positions` with the head of masked language models.

    At most one objective of a sum may predict tokens.

    Attributes:
      lm_type: the type of language model that the encoder must be, see `models.family.ModelFamily.lm_type`.
      fills_masks: whether the trained model can predict a [MASK] in a text, so that `eval.fill_masks` can be set.
      continues: whether the objective supports `data.stream`, with rows that continue in the next step.
      required_values: {field of the config: the only supported value}.
    """

    metrics: ClassVar[WordMetrics]
    lm_type: ClassVar[LmType]
    fills_masks: ClassVar[bool] = False
    continues: ClassVar[bool] = False
    required_values: ClassVar[Mapping[str, Any]] = {}

    @abc.abstractmethod
    def predictions_per_sequence(self, config: "ConfigDict", stage: Stage) -> int:
        """Returns the maximum number of predicted tokens of a sequence, the size of the axis of predictions.

        Args:
          config: the whole config, with the values of the stage.
          stage: the stage. `stage.max_predictions_per_seq` is the limit of the config.
        """

    def predictions_per_row(self, config: "ConfigDict", stage: Stage, sequences: int) -> int:
        """Returns the maximum number of predicted tokens of a packed row.

        Args:
          config: the whole config, with the values of the stage.
          stage: the stage.
          sequences: the maximum number of sequences in the row.
        """
        return sequences * self.predictions_per_sequence(config, stage)

    def batch_spec(self, config: "ConfigDict", stage: Stage) -> BatchSpec:
        """Returns the arrays of the predictions."""
        return WORD_ARRAYS

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns the head of masked language models, which all types of language models use."""
        from bertjax.models.heads import masked_lm_head

        return {"masked_lm": masked_lm_head(config, compute)}

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the cross-entropy and the accuracy."""
        return token_loss(encoded, weights)[0]

    def weights(self, batch: dict) -> "jax.Array":
        """Returns the weights of the predictions `[rows, predictions]`."""
        return batch["word_weights"]

    def normalizer(self, weights: "jax.Array") -> "jax.Array":
        """Returns the number of predictions + 1e-5, as `get_masked_lm_output` of Google's run_pretraining.py."""
        return weights.sum() + 1e-5

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the head."""
        return families.family_of(config).word_head(config).flops(config, row.predictions)

    def validate(self, config: "ConfigDict") -> None:
        """Checks that the encoder is a language model of the type `lm_type`, and checks `required_values`."""
        lm_type = families.lm_type_of(config)
        remedy = (
            f"the objective needs a {self.lm_type} language model, and config.model is a {lm_type} language model; set "
            f"{OBJECTIVE_OF_LM_TYPE[lm_type]}, or change config.model"
        )
        require(lm_type == self.lm_type, "objective", config.objective, remedy)
        for field, needed in self.required_values.items():
            unsupported = "no masks" if field in NO_MASKS else "neither masks nor pairs"
            remedy = f"the objective for {self.metrics.title} supports {unsupported}; set {needed}"
            require(value_of(config, field) == needed, field, value_of(config, field), remedy)


def token_loss(
    encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array | None" = None
) -> "tuple[tuple[jax.Array, Metrics], jax.Array | None]":
    """Returns the loss of the predicted tokens, and samples from the predicted distributions.

    Args:
      encoded: the batch, with the head `masked_lm`.
      weights: `[rows, predictions]`.
      keys: `[rows]` random keys of the samples; None for no samples.

    Returns:
      ((loss, {"accuracy": accuracy}), samples). Loss and accuracy are weighted sums, samples are token ids
      `[rows, predictions]` or None.
    """
    import jax.numpy as jnp

    from bertjax.models.heads import word_logits
    from bertjax.objectives.parts.pretraining_model import sample_tokens, sum_in_chunks, weighted_cross_entropy

    assert encoded.hidden is not None
    batch, encoder, head = encoded.batch, encoded.encoder, encoded.heads["masked_lm"]
    positions, words, size = batch["word_positions"], batch["word_ids"], head.config.padded_vocab_size

    def read(logits: Any, words: Any, weights: Any, first: Any = 0) -> tuple:
        sums = weighted_cross_entropy(logits, words, weights, encoded.z_loss)
        return sums, None if keys is None else sample_tokens(logits, keys, first * size)

    fits = positions.size * 4 * size <= MAX_LOGIT_BYTES
    if fits or encoder.is_initializing() or len(list(encoder.prediction_states(encoded.hidden, positions))) > 1:
        return read(word_logits(encoder, head, encoded.hidden, positions), words, weights)
    module, variables = head.unbind()  # `jax.lax.scan` cannot call a bound module
    table, rows = encoder.word_embeddings(), len(positions)

    def read_part(positions: Any, words: Any, weights: Any, columns: Any) -> tuple:
        logits = module.apply(variables, encoded.hidden, positions, table)
        return read(logits, words, weights, columns[0, 0])

    columns = jnp.broadcast_to(jnp.arange(positions.shape[1]), positions.shape)
    part = max(1, CHUNK_BYTES // (rows * 4 * size))
    return sum_in_chunks(read_part, (positions, words, weights, columns), part)


def query_loss(encoded: "EncodedBatch", weights: "jax.Array") -> "tuple[jax.Array, Metrics]":
    """Returns the loss and the accuracy of a query stream, whose state i makes prediction i.

    Args:
      encoded: the batch, with the head `masked_lm` and `query_states`.
      weights: `[rows, predictions]`.
    """
    import jax.numpy as jnp

    indices = jnp.broadcast_to(jnp.arange(weights.shape[1]), weights.shape)
    batch = encoded.batch | {"word_positions": indices}
    return token_loss(encoded._replace(hidden=encoded.query_states, batch=batch), weights)[0]


def max_predictions_of_row(share: float, stage: Stage, sequences: int) -> int:
    """Returns the maximum number of predicted tokens of a packed row.

    Args:
      share: the fraction of the tokens of a sequence that are predicted.
      stage: the stage.
      sequences: the maximum number of sequences of the row.
    """
    # Each sequence has round(share * tokens) predictions, and at least 1. The shortest sequence has 3 tokens.
    # Beyond share * tokens, rounding adds at most 1/2 to a sequence, and the minimum of 1 adds at most 1 - 3 * share.
    wanted = share * stage.length
    rounded = math.ceil(wanted + sequences / 2)
    at_least_one = math.floor(wanted + sequences * (1 - 3 * share))
    return min(max(rounded, at_least_one), sequences * stage.max_predictions_per_seq)


def next_tokens(ids: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the arguments of `word_arrays`, `[rows, length - 1]`: positions, next tokens, and whether they are valid.

    Each position predicts the next token, and padding is at the end. The final [SEP] of a row is not predicted,
    because it marks the end of the row and not the end of a document.

    Args:
      ids: `[rows, length]`, padded.
      sizes: `[rows]`, the number of tokens of each row.
    """
    positions = np.arange(ids.shape[1] - 1, dtype=ids.dtype)
    is_valid = positions < sizes[:, None] - 2
    return np.where(is_valid, positions, 0), np.where(is_valid, ids[:, 1:], 0), is_valid


def word_arrays(positions: np.ndarray, tokens: np.ndarray, is_valid: np.ndarray) -> Batch:
    """Returns the batch arrays of predictions.

    Args:
      positions: `[rows, predictions]`, the positions whose hidden states predict.
      tokens: `[rows, predictions]`, the ids of the predicted tokens.
      is_valid: `[rows, predictions]`, booleans; False for padding.
    """
    return {"word_positions": positions, "word_ids": tokens, "word_weights": is_valid.astype(np.float32)}
