"""The interface of an objective of pre-training.

An objective is a class in a module of this folder. The name of the module is the name of the objective, with which its
scores begin (`mlm_loss`). The modules are imported without JAX, so that commands start fast: methods import JAX when
they are called, and annotations that need JAX are quoted.

`Objective` has the methods that every objective needs. An ability that only some objectives have is a class of its own,
`JointModel` or `QueryStream`. `parts.words.WordObjective` predicts tokens. `parts.pairs.PairObjective` classifies pairs
of segments. An `AuxiliaryObjective` only supports the training of other objectives.
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
    from bertjax.nn.ops.recurrent_memory import Memory
    from bertjax.objectives.encoded_batch import EncodedBatch
    from bertjax.text.tokenizer import Tokenizer

Metrics = dict[str, "jax.Array"]  # {metric: weighted sum}


class Plot(NamedTuple):
    """A plot of the report: a metric in training and in evaluation, and a baseline in evaluation.

    Attributes:
      title: the title of the plot.
      metric: the name of the metric, without the name of the objective.
      baseline: the score of a baseline, in which {name} stands for the name of the objective; empty for none.
      is_main: whether the plot is also drawn over tokens and over hours.
    """

    title: str
    metric: str
    baseline: str = ""
    is_main: bool = False


class ObjectiveMetrics:
    """The scores of an objective on held-out data, its baselines, and its part of the report.

    The methods are extension points: the defaults score each metric, without baselines.
    """

    plots: Sequence[Plot] = ()

    def scores(self, name: str, means: Mapping[str, float]) -> dict[str, float]:
        """Returns {score: value}. `NAME_loss` must be one of the scores.

        Args:
          name: the name of the objective.
          means: the weighted means of the loss, the metrics and the baselines on held-out data.
        """
        return {f"{name}_{metric}": mean for metric, mean in means.items() if metric != "weight"}

    def report(self, name: str, scores: Mapping[str, float]) -> list[str]:
        """Returns the lines of the report, from the result of `scores`."""
        values = {score.removeprefix(f"{name}_"): x for score, x in scores.items() if score.startswith(f"{name}_")}
        return [f"held-out {name}: " + ", ".join(f"{metric} {value:.4f}" for metric, value in values.items())]

    def baselines(self, batch: dict, weights: "jax.Array", statistics: Any) -> Metrics:
        """Returns {baseline: weighted sum} of a batch. The function is compiled.

        Args:
          batch: the arrays of the batch.
          weights: the result of `Objective.weights`.
          statistics: the result of `measure_statistics`; None if there are no statistics.
        """
        del batch, weights, statistics
        return {}

    def statistics_shape(self, config: BertConfig) -> tuple[int, ...] | None:
        """Returns the shape of the statistics of the training data; None if the baselines need no statistics."""
        del config
        return None

    def measure_statistics(self, config: BertConfig, batches: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Returns the statistics of batches of training, float32 in the shape of `statistics_shape`."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Objective(abc.ABC):
    """A loss of pre-training, and the output layers and arrays of a batch that the loss needs.

    A subclass is a frozen dataclass. Its fields are its settings: `config.objectives.NAME.FIELD` sets the field, and
    `bertjax.config.field` declares the limits. Objectives with equal settings are equal, so that they share compiled
    programs.
    """

    metrics: ClassVar[ObjectiveMetrics] = ObjectiveMetrics()

    @abc.abstractmethod
    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> "tuple[jax.Array, Metrics]":
        """Returns the weighted sum of the losses, and {metric: weighted sum}.

        Args:
          encoded: the batch, its hidden states, and the output layers of `heads`.
          weights: the result of `weights`, divided by the result of `normalizer` in training.
          keys: `[rows]` random keys of this objective, in training and in evaluation. Sequences that share a row share
            its key.
        """

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns {name among the parameters: output layer}. Objectives with a common name share a layer."""
        del config, compute
        return {}

    def weights(self, batch: dict) -> "jax.Array":
        """Returns the weight of each prediction: 1, or 0 where there is none. By default `[rows]`, per sequence."""
        return batch["sequence_weights"]

    def normalizer(self, weights: "jax.Array") -> "jax.Array":
        """Returns the number that divides the loss of a batch in training. By default the sum of the weights."""
        import jax.numpy as jnp

        return jnp.maximum(weights.sum(), 1)  # data.on_corrupt=skip may leave no sequence

    def batch_spec(self, config: "ConfigDict", stage: "Stage") -> BatchSpec:
        """Returns the arrays that `transform` adds to a batch; none by default."""
        del config, stage
        return BatchSpec()

    def transform(self, config: "ConfigDict", stage: "Stage", tokenizer: "Tokenizer | None") -> "BatchTransform | None":
        """Returns the transform of the batches of a host; None if records hold all arrays that the loss needs.

        Args:
          config: the whole config in this stage.
          stage: the stage.
          tokenizer: the tokenizer of the records; None if it is unknown.
        """
        del config, stage, tokenizer
        return None

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the matrix products of the output layers for one row, forward pass only."""
        del config, row
        return 0

    def validate(self, config: "ConfigDict") -> None:
        """Checks the whole config. Raises `UserError` if the objective cannot be trained with it."""
        del config


class AuxiliaryObjective(Objective):
    """An objective that supports the training of other objectives, and is not evaluated.

    Its loss also reads the hidden states of all layers, `EncodedBatch.states`, and the array `progress` `[rows]` of the
    batch, the share of all steps that are done.
    """


class JointModel(abc.ABC):
    """The ability of an objective to train a second model beside the encoder, and to change the inputs of the encoder.

    At most one objective of a sum may have this ability.
    """

    @abc.abstractmethod
    def rewrite(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> "EncodedBatch":
        """Returns the batch that the encoder reads, before the encoder has read it.

        The method may replace `input_ids`, and then keeps the original ids as `original_ids`, or it may replace the
        parameters of the encoder. `EncodedBatch.joint_loss` takes the loss to the method `loss`.

        Args:
          encoded: the batch without hidden states.
          weights: as for `Objective.loss`.
          keys: as for `Objective.loss`.
        """

    def models(self, config: BertConfig) -> dict[str, BertConfig]:
        """Returns {name among the parameters: config} of the models that are trained beside an encoder.

        `bertjax convert --part=NAME` writes one of them.
        """
        del config
        return {}

    def export_params(self, params: dict) -> dict:
        """Returns the parameters of a checkpoint as all uses except training read them, without shared parts."""
        return params

    def import_params(self, params: dict) -> dict:
        """Returns the parameters that training starts from. This is the inverse of `export_params`.

        Raises:
          UserError: if the settings of the objective do not allow these parameters.
        """
        return params

    def delta_target(self, path: tuple[str, ...]) -> tuple[str, ...] | None:
        """Returns the path of the parameter that the parameter at `path` is added to; None if it is added to none."""
        del path
        return None

    def reason_for_all_stages(self) -> str:
        """Returns why every stage must train the objective, and the remedy; empty if stages may leave it out."""
        return ""


class QueryStream(abc.ABC):
    """The ability of an objective to have a second stream of states, which predict tokens that they do not see.

    At most one objective of a sum may have this ability.
    """

    @abc.abstractmethod
    def encode(
        self, encoder: "nn.Module", batch: dict, dropout_keys: "jax.Array | None", memory: "Memory | None" = None
    ) -> "tuple[jax.Array, jax.Array, Memory | None]":
        """Returns the hidden states, the query states `[rows, predictions, hidden]`, and the recurrent memory.

        Args:
          encoder: the encoder.
          batch: the arrays of the batch.
          dropout_keys: `[rows]` random keys; None for no dropout.
          memory: the recurrent memory of the rows; None without recurrence.
        """


class Term(NamedTuple):
    """An objective in the weighted sum that a run trains."""

    name: str
    weight: float
    objective: Objective


def joint_models(terms: Iterable[Term]) -> list[JointModel]:
    """Returns the objectives that train a second model."""
    return [term.objective for term in terms if isinstance(term.objective, JointModel)]
