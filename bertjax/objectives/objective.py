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
        """Returns the held-out scores, by default `NAME_METRIC` for each metric and baseline.

        Args:
          name: the name of the objective.
          means: {metric: mean over the held-out predictions, weighted by `Objective.weights`}. The metrics are "loss",
            the metrics of `Objective.loss`, the baselines, and "weight", whose mean is always 1.

        Returns:
          {score: value}. A score `NAME_loss` is required: minus the loss of the first objective ranks checkpoints.
        """
        metrics = ["loss", *(metric for metric in means if metric not in ("loss", "weight"))]
        return {f"{name}_{metric}": means[metric] for metric in metrics}

    def report(self, name: str, scores: Mapping[str, float]) -> list[str]:
        """Returns the lines that a run prints about the objective at its end.

        Args:
          name: the name of the objective.
          scores: {score: value} of all objectives: the results of their methods `scores`, without undefined values.
            With several sources of text, the loss and the accuracy of the first objective also have entries for each
            source, such as `mlm_loss (SOURCE)`.
        """
        values = {score.removeprefix(f"{name}_"): x for score, x in scores.items() if score.startswith(f"{name}_")}
        return [f"held-out {name}: " + ", ".join(f"{metric} {value:.4f}" for metric, value in values.items())]

    def baselines(self, batch: dict, weights: "jax.Array", statistics: Any) -> Metrics:
        """Returns the baselines of a held-out batch. `jax.jit` traces the method.

        Args:
          batch: {name: array} of an evaluation batch, which is padded and not packed.
          weights: the result of `Objective.weights`, not divided by `Objective.normalizer`.
          statistics: the result of `measure_statistics`; None if `statistics_shape` returns None.

        Returns:
          {baseline: scalar}, sums of weight * value over the predictions. `scores` receives the means under the same
          names. The names must differ from "loss", "weight" and the metrics of `Objective.loss`.
        """
        del batch, weights, statistics
        return {}

    def statistics_shape(self, config: BertConfig) -> tuple[int, ...] | None:
        """Returns the shape of the array of `measure_statistics`; None if the baselines need no statistics.

        Args:
          config: the model config of the encoder.
        """
        del config
        return None

    def measure_statistics(self, config: BertConfig, batches: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Returns the statistics of the training data that the baselines need.

        A process calls the method once, before its first evaluation, if `statistics_shape` does not return None.

        Args:
          config: the model config of the encoder.
          batches: the first training batches, with at most 65,536 sequences. A batch is {name: NumPy array}, padded and
            not packed, with the rows of all hosts and the arrays of `Objective.batch_spec`.

        Returns:
          A float32 array of the shape `statistics_shape`.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """A pre-training loss, with the heads and the batch arrays that the loss needs.

    A subclass is a frozen dataclass. Its fields are its settings: `config.objectives.NAME.FIELD` sets a field, and
    `bertjax.config.field` declares the limits. Objectives with equal settings are equal, so that they share compiled
    programs. Register an instance with `bertjax.objectives.register`.

    Attributes:
      metrics: the held-out scores, the baselines and the plots of the objective.
    """

    metrics: ClassVar[ObjectiveMetrics] = ObjectiveMetrics()

    @abc.abstractmethod
    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> "tuple[jax.Array, Metrics]":
        """Returns the loss and the metrics of a batch. `jax.jit` traces the method in training and in evaluation.

        Args:
          encoded: the batch, its hidden states, and the modules of `heads`.
          weights: float32, the result of `Objective.weights`. In training, the weights are divided by the result of
            `normalizer`, so that a weighted sum over a batch is a mean.
          keys: `[rows]` random keys for this objective, in training and in evaluation. The sequences of a packed row
            share a key.

        Returns:
          The loss, a float32 scalar, and {metric: scalar}. The loss and the metrics are sums of weight * value over the
          predictions. The names of metrics have no prefix, and differ from "loss" and "weight".
        """

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns the output layers that `loss` calls; none by default.

        Args:
          config: the model config of the encoder.
          compute: the settings of the computation, such as the dtype of activations.

        Returns:
          {parameter name: Flax module}. `loss` calls the module as `encoded.heads[name]`. Objectives that return the
          same name share the module. The names "bert", "config", "terms", "compute", "z_loss" and "head_names" are
          reserved.
        """
        del config, compute
        return {}

    def weights(self, batch: dict) -> "jax.Array":
        """Returns the weight of each prediction: 1, or 0 for padding.

        Args:
          batch: {name: array} of a batch.

        Returns:
          A float32 array with one weight per prediction, such as `[rows, length]` for predictions of tokens. By default
          one weight per sequence: `[rows]`, or in packed batches `[rows, sequences]`.
        """
        return batch["sequence_weights"]

    def normalizer(self, weights: "jax.Array") -> "jax.Array":
        """Returns the scalar that divides the weights in training. By default the sum of the weights, at least 1.

        Args:
          weights: the result of `weights` for the batch of all hosts.
        """
        import jax.numpy as jnp

        return jnp.maximum(weights.sum(), 1)  # a batch has no sequence if data.on_corrupt=skip drops all of them

    def batch_spec(self, config: "ConfigDict", stage: "Stage") -> BatchSpec:
        """Returns the arrays that `transform` adds to a batch; none by default.

        Args:
          config: the whole config, with the values of the stage.
          stage: the stage.

        Returns:
          The axis, the dtype and the padding of each array. The axis is `Axis.SEQUENCE` or `Axis.TOKEN`; a
          `WordObjective` can also use `Axis.PREDICTION`. An array of records or of another objective cannot have the
          same name.
        """
        del config, stage
        return BatchSpec()

    def transform(self, config: "ConfigDict", stage: "Stage", tokenizer: "Tokenizer | None") -> "BatchTransform | None":
        """Returns the transform that runs on the host; None if the records hold all arrays that the loss needs.

        Args:
          config: the whole config, with the values of the stage.
          stage: the stage.
          tokenizer: the tokenizer of the records; None if no tokenizer was loaded.

        Returns:
          A transform whose result contains the arrays of `batch_spec`.
        """
        del config, stage, tokenizer
        return None

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the matrix products of the heads for one row, forward pass only; 0 by default.

        A multiply-add counts as two FLOPs. The encoder is not included.

        Args:
          config: the model config of the encoder.
          row: the maximum numbers of tokens, sequences and predictions of a row.
        """
        del config, row
        return 0

    def validate(self, config: "ConfigDict") -> None:
        """Checks that the objective can be trained with a config. The limits of the settings are already checked.

        Args:
          config: the whole config, with the values of a stage that trains the objective.

        Raises:
          UserError: if the objective does not support the config. `bertjax.config.limits.require` raises such an error.
        """
        del config


class AuxiliaryObjective(Objective):
    """An objective that adds a loss in training, and is not evaluated. It cannot be the first objective of a sum.

    The loss can read two further inputs: `EncodedBatch.layer_states`, the hidden states of all layers, and the batch
    array `progress`, float32 `[rows]`, the fraction of the steps of the run that are finished, from 0 to 1.
    """


class JointModel(abc.ABC):
    """A mixin for objectives that train a second model, which changes the inputs of the encoder (as in ELECTRA).

    At most one objective of a sum may be a `JointModel`.
    """

    @abc.abstractmethod
    def rewrite(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> "EncodedBatch":
        """Runs the second model, and returns the inputs of the encoder. The method is called before the encoder runs.

        Args:
          encoded: the batch, without hidden states. `encoded.heads` has the modules of `Objective.heads`, such as the
            second model.
          weights: the weights of the predictions, as for `Objective.loss`.
          keys: `[rows]` random keys, as for `Objective.loss`.

        Returns:
          `encoded` with other values of these fields:

          - `batch` can have other `input_ids`. The array `original_ids` then contains the original ids.
          - `encoder` can be bound to other parameters.
          - `joint_loss` is the loss and the metrics of the second model, in the form that `Objective.loss` returns. The
            method `loss` of the objective returns this field.
        """

    def models(self, config: BertConfig) -> dict[str, BertConfig]:
        """Returns the configs of the second models that `bertjax convert --part=NAME` can write; none by default.

        Args:
          config: the model config of the encoder.

        Returns:
          {parameter name of the second model, which is a key of `Objective.heads`: model config}.
        """
        del config
        return {}

    def export_params(self, params: dict) -> dict:
        """Converts training parameters for inference: models that share parameters in training become independent.

        Args:
          params: {name: nested dict of NumPy arrays} of a checkpoint: the encoder as "bert", and the heads.

        Returns:
          Params of the same form. By default `params`.
        """
        return params

    def import_params(self, params: dict) -> dict:
        """Converts the parameters of `config.init_checkpoint` for training. The inverse of `export_params`.

        Args:
          params: {name: nested dict of NumPy arrays}: the encoder as "bert", and the heads. The second model can be
            absent.

        Returns:
          Params of the same form. By default `params`.

        Raises:
          UserError: if the settings of the objective do not allow these parameters.
        """
        return params

    def delta_target(self, path: tuple[str, ...]) -> tuple[str, ...] | None:
        """Returns the path of the base parameter of a delta parameter; None if `path` is not a delta parameter.

        The model adds a delta parameter to its base parameter. A delta parameter has the learning rate of the layer of
        its base parameter.

        Args:
          path: the path of a parameter in the params of the model, such as
            ("generator", "difference", "word", "embedding").
        """
        del path
        return None

    def stage_omission_error(self) -> str:
        """Returns the error message for a stage that does not train the objective; "" if stages can omit it.

        The message follows "the stage trains OBJECTIVES, not NAME; ", and states the reason and the fix.
        """
        return ""


class QueryStream(abc.ABC):
    """A mixin for objectives with two-stream attention (as in XLNet and MPNet).

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
        """Runs both streams of the encoder.

        Args:
          encoder: the encoder, bound to its parameters. `EncoderModel.encode_permuted` or
            `TransformerModel.encode_compensated` runs both streams.
          batch: {name: array}: the arrays of records, of `Objective.batch_spec`, and of packing.
          dropout_keys: `[rows]` random keys; None for no dropout.
          memory: the recurrent memory of the rows from the previous step; None without recurrence.

        Returns:
          The hidden states `[rows, length, hidden]`; the query states `[rows, predictions, hidden]`, which
          `EncodedBatch.query_states` passes to the loss; and the next recurrent memory, or None without recurrence.
        """


class Term(NamedTuple):
    """An objective and its weight in the sum that a run trains."""

    name: str
    weight: float
    objective: Objective


def joint_models(terms: Iterable[Term]) -> list[JointModel]:
    """Returns the objectives that train a second model."""
    return [term.objective for term in terms if isinstance(term.objective, JointModel)]
