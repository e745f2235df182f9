"""The interface of a pre-training objective.

An objective is a class in a module of this folder. The name of the module is the name of the objective, and the prefix
of the objective's scores (`mlm_loss`). The modules do not import JAX at the top, so that commands start fast: methods
import JAX when they are called, and annotations that need JAX are quoted.

`Objective` has the methods that every objective needs. `JointModel` and `QueryStream` are mixins for abilities that
only some objectives have. `parts.words.WordObjective` predicts tokens. `parts.pairs.PairObjective` classifies pairs
of segments. An `AuxiliaryObjective` adds a loss in training, and is not evaluated.
"""

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from bertjax.config.model_config import BertConfig, Compute
from bertjax.data.batch import BatchSpec, RowSize

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from ml_collections import ConfigDict

    from bertjax.config.stages import Stage
    from bertjax.data.loading.transforms import BatchTransform
    from bertjax.nn.ops.recurrent_memory import RecurrentMemory
    from bertjax.objectives.encoded_batch import EncodedBatch
    from bertjax.text.tokenizer import Tokenizer

Metrics = dict[str, "jax.Array"]  # {metric: scalar, the sum of weight * value over the predictions}


class Plot(NamedTuple):
    """A plot in the report: the training curve and the evaluation curve of a metric, and a baseline.

    Attributes:
      title: the title of the plot.
      metric: the name of the metric, without the prefix of the objective.
      baseline: the name of the baseline's score, such as `{name}_majority`; {name} is replaced by the name of the
        objective. Empty: no baseline.
      is_main: whether the report also draws the metric against tokens and against hours, beside steps.
    """

    title: str
    metric: str
    baseline: str = ""
    is_main: bool = False


class ObjectiveMetrics:
    """The held-out scores, the baselines and the report lines of an objective.

    By default, each metric is a score, and there are no baselines.
    """

    plots: Sequence[Plot] = ()

    def scores(self, name: str, means: Mapping[str, float]) -> dict[str, float]:
        """Returns {score: value}. `NAME_loss` must be one of the scores.

        Args:
          name: the name of the objective.
          means: {metric: weighted mean on held-out data} of the loss, the metrics and the baselines. The entry `weight`
            is the sum of the weights.
        """
        metrics = ["loss", *(metric for metric in means if metric not in ("loss", "weight"))]
        return {f"{name}_{metric}": means[metric] for metric in metrics}

    def report(self, name: str, scores: Mapping[str, float]) -> list[str]:
        """Returns the lines of the report.

        Args:
          name: the name of the objective.
          scores: the result of `scores`.
        """
        values = {score.removeprefix(f"{name}_"): x for score, x in scores.items() if score.startswith(f"{name}_")}
        return [f"held-out {name}: " + ", ".join(f"{metric} {value:.4f}" for metric, value in values.items())]

    def baselines(self, batch: dict, weights: "jax.Array", statistics: Any) -> Metrics:
        """Returns {baseline: weighted sum} of a batch. The method runs under `jax.jit`.

        Args:
          batch: the arrays of the batch.
          weights: the result of `Objective.weights`.
          statistics: the result of `measure_statistics`; None if there are no statistics.
        """
        del batch, weights, statistics
        return {}

    def statistics_shape(self, config: BertConfig) -> tuple[int, ...] | None:
        """Returns the shape of the array of `measure_statistics`; None if the baselines need no statistics."""
        del config
        return None

    def measure_statistics(self, config: BertConfig, batches: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Returns the statistics of training batches that the baselines need, float32 of `statistics_shape`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """A pre-training loss, with the heads and the batch arrays that the loss needs.

    A subclass is a frozen dataclass. Its fields are its settings: `config.objectives.NAME.FIELD` sets the field, and
    `bertjax.config.field` declares the limits. Objectives with equal settings are equal, so that they share compiled
    programs.
    """

    metrics: ClassVar[ObjectiveMetrics] = ObjectiveMetrics()

    @abc.abstractmethod
    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> "tuple[jax.Array, Metrics]":
        """Returns the loss, a scalar, and {metric: scalar}. Both are sums of weight * value over the predictions.

        Args:
          encoded: the batch, its hidden states, and the modules of `heads`.
          weights: the result of `Objective.weights`. In training, `normalizer` has divided the weights, so that the sum
            is a mean.
          keys: `[rows]` random keys for this objective, in training and in evaluation. The sequences of a packed row
            share a key.
        """

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns {parameter name: head}. Objectives that return the same name share the head."""
        del config, compute
        return {}

    def weights(self, batch: dict) -> "jax.Array":
        """Returns the weight of each prediction: 1, or 0 for padding. By default a weight per sequence, `[rows]`."""
        return batch["sequence_weights"]

    def normalizer(self, weights: "jax.Array") -> "jax.Array":
        """Returns the scalar that divides the weights of a global batch in training. By default the weights' sum."""
        import jax.numpy as jnp

        return jnp.maximum(weights.sum(), 1)  # a batch has no sequence if data.on_corrupt=skip drops all of them

    def batch_spec(self, config: "ConfigDict", stage: "Stage") -> BatchSpec:
        """Returns the arrays that `transform` adds to a batch; none by default."""
        del config, stage
        return BatchSpec()

    def transform(self, config: "ConfigDict", stage: "Stage", tokenizer: "Tokenizer | None") -> "BatchTransform | None":
        """Returns the transform that runs on the host; None if the records hold all arrays that the loss needs.

        Args:
          config: the whole config, with the values of the stage.
          stage: the stage.
          tokenizer: the tokenizer of the records; None if no tokenizer was loaded.
        """
        del config, stage, tokenizer
        return None

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the matrix products of the heads for one row, forward pass only."""
        del config, row
        return 0

    def validate(self, config: "ConfigDict") -> None:
        """Raises `UserError` if the objective cannot be trained with the whole config."""
        del config


class AuxiliaryObjective(Objective):
    """An objective that adds a loss in training, and is not evaluated.

    The loss can read two further inputs: `EncodedBatch.layer_states`, the hidden states of all layers, and the batch
    array `progress` `[rows]`, the fraction of the steps of the run that are finished.
    """


class JointModel(abc.ABC):
    """A mixin for objectives that train a second model, which changes the inputs of the encoder (as in ELECTRA).

    At most one objective of a sum may be a `JointModel`.
    """

    @abc.abstractmethod
    def rewrite(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> "EncodedBatch":
        """Runs the second model, and returns the inputs of the encoder.

        The model calls this method before the encoder. The method may replace `input_ids`; it then stores the original
        ids as `original_ids`. It may also replace the parameters of `EncodedBatch.encoder`. It stores the loss of the
        second model in `EncodedBatch.joint_loss`, from which the method `loss` returns it.

        Args:
          encoded: the batch, without hidden states.
          weights: as for `Objective.loss`.
          keys: as for `Objective.loss`.
        """

    def models(self, config: BertConfig) -> dict[str, BertConfig]:
        """Returns {parameter name: config} of the second models for an encoder with this config.

        `bertjax convert --part=NAME` converts a second model.
        """
        del config
        return {}

    def export_params(self, params: dict) -> dict:
        """Converts training parameters for inference: models that share parameters in training become independent."""
        return params

    def import_params(self, params: dict) -> dict:
        """Converts the parameters of a checkpoint for training. The inverse of `export_params`.

        Raises:
          UserError: if the settings of the objective do not allow these parameters.
        """
        return params

    def delta_target(self, path: tuple[str, ...]) -> tuple[str, ...] | None:
        """Returns the path of the base parameter of a delta parameter; None if `path` is not a delta parameter.

        A delta parameter is added to its base parameter, and has the learning rate of the base parameter's layer.
        """
        del path
        return None

    def stage_omission_error(self) -> str:
        """Returns the error message for a stage that does not train the objective; empty if this is allowed."""
        return ""


class QueryStream(abc.ABC):
    """A mixin for objectives with two-stream attention (as in XLNet).

    The hidden states of the query stream predict tokens, and do not attend to the predicted tokens. At most one
    objective of a sum may be a `QueryStream`.
    """

    @abc.abstractmethod
    def encode(
        self,
        encoder: "nn.Module",
        batch: dict,
        dropout_keys: "jax.Array | None",
        memory: "RecurrentMemory | None" = None,
    ) -> "tuple[jax.Array, jax.Array, RecurrentMemory | None]":
        """Returns the hidden states, the query states and the new recurrent memory.

        The hidden states are `[rows, length, hidden]`, the query states `[rows, predictions, hidden]`.

        Args:
          encoder: the encoder.
          batch: the arrays of the batch.
          dropout_keys: `[rows]` random keys; None for no dropout.
          memory: the recurrent memory of the rows from the previous step; None without recurrence.
        """


class Term(NamedTuple):
    """An objective and its weight in the sum that a run trains."""

    name: str
    weight: float
    objective: Objective


def joint_models(terms: Iterable[Term]) -> list[JointModel]:
    """Returns the objectives that train a second model."""
    return [term.objective for term in terms if isinstance(term.objective, JointModel)]
