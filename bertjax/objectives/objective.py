"""The interface of an objective of pre-training.

An objective is a module in this folder, found by its name, with which its metrics begin (`mlm_loss`). It defines
everything that training, evaluation, the planner and the report read of the objective. The module is imported without
the modules of JAX, which its functions import when they are called.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bertjax.config.model_config import BertConfig, Compute

if TYPE_CHECKING:
    import flax.linen as nn
    import jax

    from bertjax.data.loading.packing import RowSize
    from bertjax.data.loading.transforms import Addition
    from bertjax.nn.ops.recurrent_memory import Memory
    from bertjax.objectives.encoded_batch import EncodedBatch
    from bertjax.text.tokenizer import Tokenizer


class Statistics(NamedTuple):
    """What a baseline knows of the training data.

    Attributes:
      shape: model's config -> the shape of what `measure` returns, a float32 array.
      measure: (model's config, batches of training) -> the array.
    """

    shape: Callable[[BertConfig], tuple[int, ...]]
    measure: Callable[[BertConfig, Iterable[Mapping[str, np.ndarray]]], np.ndarray]


class Plot(NamedTuple):
    """A picture in the report: a metric in training and evaluation, and a baseline of the evaluation.

    Attributes:
      baseline: a score, in which {name} stands for the objective's name.
      is_main: whether it is also drawn against tokens and hours.
    """

    title: str
    metric: str
    baseline: str = ""
    is_main: bool = False


def _number_of_predictions(weights):
    import jax.numpy as jnp

    return jnp.maximum(weights.sum(), 1)  # data.on_corrupt=skip may leave none


@dataclasses.dataclass(frozen=True)
class Objective:
    """Something to learn.

    Args:
      loss: (encoded batch, weights, keys `[rows]`) -> the weighted sum of the losses, and {metric: weighted sum}. The
        keys are random, the objective's own, and given in evaluation too; sequences that share a row share its key.
        None: it has `rewrite` instead.
      scores: (its name, {metric, loss or baseline: weighted mean on held-out text}) -> {score: value}. `NAME_loss` must
        be one.
      report: (its name, scores) -> lines of the report.
      heads: (model's config, how it computes) -> {name among the params: module}, its output layers. Objectives that
        name the same share it.
      weights: batch -> how much each prediction counts: 1, or 0 for one that is not there.
      total: weights of a batch -> what the loss is divided by in training, for its mean.
      baselines: (batch, weights, statistics or None) -> {baseline: weighted sum}.
      statistics: what the baselines know of the training data, if anything.
      words_per_sequence: (config, stage) -> words of a sequence that are predicted, at most; None: it predicts none.
        One objective of a sum may.
      words_per_row: (config, stage, sequences) -> words that are predicted, at most, in a row that so many sequences
        share; None: so many times those of a sequence.
      adds: {name: (per "token" or "sequence", type)}, arrays that its `addition` adds to a batch, besides those of
        words (`word_positions`, `word_ids`, `word_weights`).
      addition: (config, stage, tokenizer) -> what a host adds to batches for it; None: records have all that it needs.
      flops: (model's config, size of a row) -> matrix-multiply FLOPs of its output layers for a row, forwards.
      validate: whole config -> None. Raises `UserError` if it cannot be learnt with it.
      plots: what the report draws.
      fills_masks: whether the model can fill a [MASK] afterwards.
      encode: (encoder, batch, dropout keys `[rows]`, what rows that go on remember or None) -> (hidden states, states
        that predict words `[rows, predictions, hidden]`, what rows then remember): how a batch is read, if not by the
        encoder's `encode`. One objective of a sum may say it.
      rewrite: (batch that the encoder has not read, weights, keys) -> (batch as it reads it, what `loss` returns). It
        changes `input_ids`, and keeps those of the text as `original_ids`; or the params of the encoder. One objective
        of a sum may.
      models: model's config -> {name among the params: config}, the models that are trained beside the encoder, each
        as a model of its own: `convert --part=NAME`.
      goes_on: whether it can be learnt from a stream of text, whose rows go on in the next step (`data.stream`).
      finished: params of a checkpoint -> those that all but training read: its own may be spread over others.
      start: the inverse: params that `finished` returned, perhaps of a run with other settings or other objectives ->
        those that training starts from. Raises `UserError` if there are no such params.
      moves: path of one of its params -> that of the param of the encoder that it is added to; None: to none.
      in_all_stages: why a run that learns it must do so in all stages, and what to do; empty: it need not.
      settings: a frozen dataclass of `config.field`s with defaults, which say their limits: `config.objectives.NAME`.
      made: settings -> the objective with them; it itself has the defaults.
      is_auxiliary: whether it only helps others of the sum to be learnt: it is not evaluated, so that it has no scores,
        and its loss also gets `EncodedBatch.states`, and `progress` in the batch.
    """

    loss: Callable[["EncodedBatch", "jax.Array", "jax.Array"], tuple["jax.Array", dict[str, "jax.Array"]]] | None
    scores: Callable[[str, dict[str, float]], dict[str, float]]
    report: Callable[[str, Mapping[str, float]], list[str]]
    heads: Callable[[BertConfig, Compute], dict[str, "nn.Module"]] = lambda config, compute: {}
    weights: Callable[[dict], "jax.Array"] = lambda batch: batch["sequence_weights"]
    total: Callable[["jax.Array"], "jax.Array"] = _number_of_predictions
    baselines: Callable[[dict, "jax.Array", Any], dict[str, "jax.Array"]] = lambda batch, weights, statistics: {}
    statistics: Statistics | None = None
    words_per_sequence: Callable[[Any, Any], int] | None = None
    words_per_row: Callable[[Any, Any, int], int] | None = None
    adds: Mapping[str, tuple[str, type]] = dataclasses.field(default_factory=dict)
    addition: Callable[[Any, Any, "Tokenizer"], "Addition | None"] = lambda config, stage, tokenizer: None
    flops: Callable[[BertConfig, "RowSize"], int] = lambda config, row: 0
    validate: Callable[[Any], None] = lambda config: None
    plots: Sequence[Plot] = ()
    fills_masks: bool = False
    encode: Callable[["nn.Module", dict, "jax.Array", "Memory | None"], tuple] | None = None
    rewrite: Callable[["EncodedBatch", "jax.Array", "jax.Array"], tuple["EncodedBatch", tuple]] | None = None
    models: Callable[[BertConfig], dict[str, BertConfig]] = lambda config: {}
    goes_on: bool = False
    finished: Callable[[dict], dict] = lambda params: params
    start: Callable[[dict], dict] = lambda params: params
    moves: Callable[[tuple[str, ...]], tuple[str, ...] | None] = lambda path: None
    in_all_stages: str = ""
    settings: type | None = None
    made: Callable[[Any], "Objective"] | None = None
    is_auxiliary: bool = False


class Term(NamedTuple):
    """An objective in the sum that is learnt."""

    name: str
    weight: float
    objective: Objective
