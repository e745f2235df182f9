"""Evaluates the objectives, and the baselines that the scores are compared with, on held-out data."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.config.stages import stage_index
from bertjax.data.batch import Batch
from bertjax.distributed.mesh import batch_sharding, local_copy, replicated
from bertjax.distributed.rules import RULES
from bertjax.distributed.transfers import copy_to_devices, fetch_results
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.nn.ops.dropout import row_keys
from bertjax.objectives.objective import AuxiliaryObjective, Objective, Term
from bertjax.objectives.parsing import terms_of_stages
from bertjax.objectives.parts.pretraining_model import PretrainingModel
from bertjax.pretraining.adaptation import HeldOutText
from bertjax.pretraining.data import StageData
from bertjax.pretraining.losses import StageLoss, init_carry
from bertjax.pretraining.scores import divide_sequences, means_of, normalized, objective_scores
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.evaluator import Evaluator
from bertjax.training.scores import Scores

STATISTICS_SEQUENCES = 65_536  # the number of training sequences that the statistics of the baselines are measured on
# The minimum number of rows of a batch of a held-out stream. With few rows, each row reads a long stretch of text.
STREAM_ROWS = 8


class PretrainingEvaluator(Evaluator):
    """Scores the objectives of a stage on the held-out sequences of the stage.

    Args:
      config: the whole config.
      mesh: the mesh of the run.
      data: the data of each stage.
      losses: the loss of each stage.
      tokenizer: the tokenizer of the records, for bits per byte.
      heldout_text: the text for bits per byte (`eval.bits_windows`); None if bits per byte are not measured.

    Attributes:
      batch_size: the number of rows of an evaluation batch.
    """

    def __init__(
        self,
        config: ConfigDict,
        mesh: Mesh,
        data: Sequence[StageData],
        losses: Sequence[StageLoss],
        tokenizer: Tokenizer | None = None,
        heldout_text: HeldOutText | None = None,
    ) -> None:
        self._config, self._mesh, self._data, self._losses = config, mesh, data, losses
        self._tokenizer, self._heldout_text = tokenizer, heldout_text
        self._terms = terms_of_stages(config)
        self._model_config = families.config_of(config)
        self._statistics: dict[str, np.ndarray] | None = None  # measured at the first evaluation
        self._steps: dict[StageLoss, jax.stages.Wrapped] = {}  # compiled functions
        self._init_carries: dict[StageLoss, Callable] = {}  # compiled functions
        self.batch_size = self._rows_of_batch()

    def _rows_of_batch(self) -> int:
        if self._config.data.stream:  # the text of a row must not depend on the number of microbatches
            devices = self._mesh.shape["data"] * self._mesh.shape["fsdp"]
            return devices * -(-STREAM_ROWS // devices)
        # A microbatch of training fits in memory.
        stages = (data for data in self._data if not data.stage.grows)
        return min(data.rows // data.config.microbatches for data in stages)

    def run(self, params: dict, step: int, after_batch: Callable[[], None] = lambda: None) -> Scores | None:
        """Returns the scores after `step` updates, in the stage of the last update; None without held-out data.

        Evaluates the first `eval.max_sequences` held-out sequences. Scores of stages with different sequence lengths
        are not comparable. With several sources, a score is the mean over the sources, weighted by their fractions of
        the training data. `mlm_loss (SOURCE)` and `mlm_accuracy (SOURCE)` are the scores of the first objective on one
        source.
        """
        index = stage_index([data.stage for data in self._data], step - 1)
        data, loss = self._data[index], self._losses[index]
        heldout = data.records.heldout
        shares = {source: data.records.shares.get(source, 1.0) for source in heldout}
        shares = normalized({source: share for source, share in shares.items() if share})
        if not shares:
            return None
        statistics = jax.device_put(self._measured_statistics(after_batch), replicated(self._mesh))
        means, total = {}, 0
        for source, sequences in divide_sequences(self._config.eval.max_sequences, shares).items():
            batches, sums = data.heldout_batches(source, self.batch_size, sequences), None
            with jax.set_mesh(self._mesh), nn.logical_axis_rules(RULES):
                for result in fetch_results(self._results(params, batches, statistics, loss)):
                    sums = result if sums is None else jax.tree.map(np.add, sums, result)
                    after_batch()
            evaluated, sums_of_objectives = jax.tree.map(float, sums)
            means[source], total = means_of(sums_of_objectives), total + round(evaluated)
        first = loss.terms[0].name
        scores = objective_scores(loss.terms, means, shares)
        if f"{first}_loss" not in scores:  # no held-out sequences, or all of them are corrupt
            return None
        if self._heldout_text is not None and families.lm_type_of(data.config) == families.lm_type_of(self._config):
            scores |= self._bits_per_byte(self._heldout_text, params, loss)
        # The scores of two stages are comparable only if these fields have the same values in both.
        changes = [f"{x} = {y}" for x, y in data.stage.changes.items() if x.startswith(("data.", "objective"))]
        measured_on = ", ".join([f"{total} sequences of length {data.stage.length}", *changes])
        return Scores({**scores}, -scores[f"{first}_loss"], measured_on)

    def _results(self, params: dict, batches: Iterator[Batch], statistics: dict, loss: StageLoss) -> Iterator[tuple]:
        """Yields the result of `eval_step` for each batch. In a stream, a batch has the carry of the previous batch."""
        eval_step, carry, seed = self.eval_step(loss), self._init_carry(loss), self._config.data.seed
        for index, batch in enumerate(copy_to_devices(batches, self._mesh)):
            result, carry = eval_step(params, batch, statistics, np.array([seed, index], np.int32), carry)
            yield result

    def _bits_per_byte(self, text: HeldOutText, params: dict, loss: StageLoss) -> dict[str, float]:
        """Returns the bits per byte of each source. Each host measures all sources, on one device with all params."""
        model = self._eval_model(loss)
        network = BertForMaskedLM(model.config, model.compute)
        assert self._tokenizer is not None
        scores_by_source = text.score(network, local_copy(params, self._mesh), self._tokenizer)
        bits = {f"bits_per_byte ({source})": scores["bits_per_byte"] for source, scores in scores_by_source.items()}
        return {name: value for name, value in bits.items() if value is not None}

    def eval_step(self, loss: StageLoss) -> jax.stages.Wrapped:
        """Returns the compiled function that evaluates a batch.

        The function is (params, batch, statistics, seed_and_index, carry) -> ((sequences, sums), carry):
          params: cast params.
          batch: the arrays of the batch.
          statistics: {objective: statistics of the baselines}.
          seed_and_index: int32 `[2]`, the seed and the index of the batch, which derive the random keys.
          carry: the carry of the rows; None without a stream.
          sequences: scalar, the number of sequences.
          sums: {objective: {metric: weighted sum}}.
        """
        if loss not in self._steps:
            model, out = self._eval_model(loss), (replicated(self._mesh), batch_sharding(self._mesh))
            self._steps[loss] = jax.jit(functools.partial(_eval_step, loss, model), out_shardings=out)
        return self._steps[loss]

    def abstract_arguments(self, data: StageData, loss: StageLoss) -> tuple:
        """Returns the shapes, dtypes and shardings of the arguments of `eval_step`, without the params."""
        seed_and_index = jax.ShapeDtypeStruct((2,), np.int32, sharding=replicated(self._mesh))
        batch = data.abstract_eval_batch(self.batch_size)
        sharding = batch_sharding(self._mesh)
        carry = jax.eval_shape(lambda: self._init_carry(loss))
        carry = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), carry)
        statistics = {
            term.name: jax.ShapeDtypeStruct(shape, np.float32, sharding=replicated(self._mesh))
            for term, shape in self._terms_with_statistics()
        }
        return batch, statistics, seed_and_index, carry

    def _eval_model(self, loss: StageLoss) -> PretrainingModel:
        """Returns the model for evaluation, with `eval.memory_length` and `eval.clamp_length`."""
        names = ("memory_length", "clamp_length")
        fields = {name: value for name in names if (value := self._config.eval[name])}
        model = loss.model
        return model.clone(config=dataclasses.replace(model.config, **fields)) if fields else model

    def _init_carry(self, loss: StageLoss) -> Any:
        """Returns the initial carry of the rows of a batch; None without a stream."""
        if not self._config.data.stream:
            return None
        if loss not in self._init_carries:
            new = functools.partial(init_carry, self._eval_model(loss), self.batch_size)
            self._init_carries[loss] = jax.jit(new, out_shardings=batch_sharding(self._mesh))
        return self._init_carries[loss]()

    def _terms_with_statistics(self) -> Iterator[tuple[Term, tuple[int, ...]]]:
        """Yields the objectives whose baselines need statistics, and the shape of the statistics."""
        for term in self._terms:
            shape = term.objective.metrics.statistics_shape(self._model_config)
            if shape is not None:
                yield term, shape

    def _measured_statistics(self, after_batch: Callable[[], None]) -> dict[str, np.ndarray]:
        """Returns {objective: statistics of the baselines}, measured on `STATISTICS_SEQUENCES` training sequences.

        The sequences of an objective are from the first stage whose batches have the arrays of the objective.
        """

        def batches(objective: Objective) -> Iterator[Batch]:
            stage = next(data for data in self._data if data.has_arrays_of(objective))
            for batch in stage.first_batches(STATISTICS_SEQUENCES):
                yield batch
                after_batch()

        if self._statistics is None:
            self._statistics = {
                term.name: term.objective.metrics.measure_statistics(self._model_config, batches(term.objective))
                for term, _ in self._terms_with_statistics()
            }
        return self._statistics


def _eval_step(
    loss: StageLoss,
    model: PretrainingModel,
    params: dict,
    batch: dict,
    statistics: Mapping,
    seed_and_index: jax.Array,
    carry: Any,
) -> tuple[tuple[jax.Array, dict], Any]:
    """Evaluates a batch, see `PretrainingEvaluator.eval_step`."""
    seed, index = seed_and_index
    rows = len(batch["input_ids"])
    keys = row_keys(jax.random.key(seed, impl="threefry2x32"), index * rows + jnp.arange(rows))
    weights = loss.weights(batch)
    inputs = batch if carry is None else batch | {"carry": carry}
    losses, carry = model.apply({"params": params}, inputs, weights, None, keys)
    sums = {}
    for name, _, objective in loss.terms:
        if isinstance(objective, AuxiliaryObjective):
            continue
        total, metrics = losses[name]
        baselines = objective.metrics.baselines(batch, weights[name], statistics.get(name))
        sums[name] = {"weight": weights[name].sum(), "loss": total, **metrics, **baselines}
    return (batch["sequence_weights"].sum(), sums), carry
