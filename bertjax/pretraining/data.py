"""The batches of a pre-training stage: the shapes of the arrays, and the batches that are read from records."""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.lists import mixture_of
from bertjax.config.stages import Stage, config_in, stages_of, total_steps
from bertjax.data.batch import (
    PROGRESS_ARRAYS,
    STREAM_ARRAYS,
    WORD_ARRAYS,
    Batch,
    BatchSpec,
    RowSize,
    record_arrays,
)
from bertjax.data.loading import pipeline
from bertjax.data.loading.order import Order, count_groups
from bertjax.data.loading.packing import round_up
from bertjax.data.loading.transforms import SeededTransform
from bertjax.data.records.manifest import training_shares
from bertjax.data.records.record_sets import RecordSet, find_records, mix_sources
from bertjax.distributed.mesh import batch_sharding, local_rows
from bertjax.models import families
from bertjax.objectives.objective import AuxiliaryObjective, Objective
from bertjax.objectives.parsing import parse_objective
from bertjax.objectives.parts.transforms import transforms_of
from bertjax.objectives.parts.words import WordObjective
from bertjax.text.tokenizer import Tokenizer

MAX_SEQUENCES_PER_ROW = 8  # the maximum number of sequences in a packed row; see experiments/benchmarks/RESULTS.md


class StageRecords(NamedTuple):
    """The records of a stage.

    Attributes:
      order: the order of the training records.
      heldout: {source: held-out records}.
      shares: {source: fraction of the training sequences}.
      transforms: the transforms of the objectives.
    """

    order: Order
    heldout: Mapping[str, RecordSet]
    shares: Mapping[str, float]
    transforms: Sequence[SeededTransform]


class StageData:
    """The batches of a stage.

    Args:
      config: the whole config.
      stage: the stage.
      mesh: the mesh of the run.
      records: the records; None in the planner, which reads no batches.
      rows: the number of rows of a packed batch, if `records` is None.

    Attributes:
      stage: the stage.
      config: the whole config, with the values of the stage.
      spec: the arrays of a training batch.
      padded_spec: the arrays of a training batch before packing.
      eval_spec: the arrays of an evaluation batch. Evaluation batches are not packed.
      row: the size of a row of a training batch.
      eval_row: the size of a row of an evaluation batch.
      rows: the number of rows of the first training batch. With packing, later batches may have a few more or
        fewer rows.

    Raises:
      UserError: if the batch size is not a multiple of microbatches * data-parallel devices.
    """

    def __init__(
        self, config: ConfigDict, stage: Stage, mesh: Mesh, records: StageRecords | None = None, rows: int | None = None
    ) -> None:
        self.stage, self.config, self._mesh, self._records = stage, config_in(config, stage), mesh, records
        self._total_steps = total_steps(config)
        _check_batch_size(self.config, stage, mesh)
        is_packed = config.packing
        self.padded_spec = batch_spec(self.config, stage)
        self.spec = packed_spec(self.config, self.padded_spec) if is_packed else self.padded_spec
        self.eval_spec = self.padded_spec.without(PROGRESS_ARRAYS)
        self.eval_row = RowSize(stage.length, 1, max_predictions_per_sequence(self.config, stage))
        self.row = packed_row_size(self.config, stage) if is_packed else self.eval_row
        self.rows = rows or stage.batch_size
        if is_packed and records is not None:
            self.rows = records.order.rows(0, row_multiple(self.config, mesh))

    @property
    def records(self) -> StageRecords:
        """The records of the stage."""
        assert self._records is not None, "StageData has no records"
        return self._records

    def batches(self, start: int) -> Iterator[Batch]:
        """Yields this host's rows of each training batch, until the end of the stage.

        Args:
          start: the step of the run at which the first batch is used.
        """
        first, end = self.stage.first_step, self.stage.end_step
        order, predictions = self.records.order, self.stage.max_predictions_per_seq
        spec, rows = self.spec.without(PROGRESS_ARRAYS), functools.partial(local_rows, self._mesh)
        options: dict[str, Any] = dict(start=start - first, rows=rows, transforms=self.records.transforms)
        if self.config.packing:
            multiple = row_multiple(self.config, self._mesh)
            batches = pipeline.packed_batches(order, spec, predictions, multiple=multiple, **options)
        else:
            batches = pipeline.train_batches(order, spec, predictions, **options)
        for step, batch in zip(range(start, end), batches):
            if PROGRESS_ARRAYS.keys() <= self.spec.keys():
                count = len(batch["input_ids"])
                batch = {**batch, "progress": np.full(count, step / self._total_steps, np.float32)}
            yield batch

    def has_arrays_of(self, objective: Objective) -> bool:
        """Returns whether padded batches of this stage have the arrays of an objective (perhaps of another stage)."""
        return objective.batch_spec(self.config, self.stage).keys() <= self.padded_spec.keys()

    def first_batches(self, sequences: int) -> Iterator[Batch]:
        """Yields the first training batches, padded, with the rows of all hosts.

        Args:
          sequences: the maximum total number of sequences; at least one batch is yielded.
        """
        order, predictions = self.records.order, self.stage.max_predictions_per_seq
        batches = pipeline.train_batches(order, self.eval_spec, predictions, transforms=self.records.transforms)
        count = max(1, min(sequences, order.files.total) // order.batch_size)
        yield from itertools.islice(batches, count)

    def heldout_batches(self, source: str, batch_size: int, max_sequences: int) -> Iterator[Batch]:
        """Yields this host's rows of the batches of the first `max_sequences` held-out sequences of a source."""
        yield from pipeline.heldout_batches(
            self.records.heldout[source],
            self.eval_spec,
            self.stage.length,
            self.stage.max_predictions_per_seq,
            batch_size=batch_size,
            max_sequences=max_sequences,
            rows=functools.partial(local_rows, self._mesh),
            transforms=self.records.transforms,
            seed=self.config.data.seed,
            is_stream=self.config.data.stream,
        )

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes, dtypes and shardings of a training batch."""
        return self.spec.abstract(self.rows, self.row, batch_sharding(self._mesh))

    def abstract_eval_batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes, dtypes and shardings of an evaluation batch."""
        return self.eval_spec.abstract(rows, self.eval_row, batch_sharding(self._mesh))


def _check_batch_size(config: ConfigDict, stage: Stage, mesh: Mesh) -> None:
    """Raises `UserError` if the batch size is not a multiple of microbatches * data-parallel devices."""
    devices, microbatches = mesh.shape["data"] * mesh.shape["fsdp"], config.microbatches
    if stage.batch_size % (microbatches * devices):
        raise UserError(
            f"config.stages.{stage.name}: the batch size {stage.batch_size} must be a multiple of "
            f"{microbatches * devices} (microbatches = {microbatches}, mesh.data * mesh.fsdp = {devices}); change one "
            f"of these fields"
        )


def planned_stages(config: ConfigDict, mesh: Mesh, rows: Sequence[int] | None = None) -> list[StageData]:
    """Returns the data of all stages without records, for the planner.

    Args:
      config: the whole config.
      mesh: the mesh of the run.
      rows: the number of rows of a packed batch in each stage, see `estimate_packed_rows`; None without packing.
    """
    stages = stages_of(config)
    counts: Sequence[int | None] = rows or [None] * len(stages)
    return [StageData(config, stage, mesh, rows=count) for stage, count in zip(stages, counts)]


def load_stages(
    config: ConfigDict,
    mesh: Mesh,
    records: epath.PathLike,
    cache: epath.Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[StageData]:
    """Returns the data of all stages.

    Args:
      config: the whole config.
      mesh: the mesh of the run.
      records: the folder of the records.
      cache: a folder in which the record counts of files without a manifest are cached.
      tokenizer: the tokenizer of the records, for transforms such as dynamic masking.

    Raises:
      UserError: if the records do not match the config.
    """
    for stage in stages_of(config):  # before any record is read
        _check_batch_size(config_in(config, stage), stage, mesh)
    token_types = max(2, families.config_of(config).type_vocab_size)
    find = functools.cache(
        functools.partial(
            find_records, records, vocab_size=config.model.vocab_size, cache=cache, token_types=token_types,
            on_corrupt=config.data.on_corrupt, checksums=config.data.checksums,
        )
    )  # fmt: skip
    shares, data = training_shares(records), []
    for stage in stages_of(config):
        size, stage_config = (stage.length, stage.max_predictions_per_seq), config_in(config, stage)
        train = find(*size, split="train", measures=config.packing)
        assert train is not None  # `find_records` raises an error for missing records of training
        mixture: Mapping[str, float] = {}
        if any(train.sources):
            mixture = mixture_of(stage_config, dict.fromkeys([*shares, *train.sources], 1.0), train.sizes)
        train = mix_sources(train, mixture) if mixture else train
        row = packed_row_size(stage_config, stage)
        order = Order(train, stage.batch_size, config.seed, row, stage.sequences_before, config.data.stream)
        heldout = find(*size, split="heldout")
        stage_records = StageRecords(
            order,
            heldout.by_source() if heldout else {},
            {source: share * mixture.get(source, 1) for source, share in shares.items()},
            transforms_of(config, stage, tokenizer),
        )
        data.append(StageData(config, stage, mesh, stage_records))
    if config.eval.patience and not all(stage.records.heldout for stage in data):
        raise UserError(
            f"config.eval.patience = {config.eval.patience}: early stopping needs held-out records, and {records} has "
            "none; set 0, or prepare the records with data.heldout_fraction above 0"
        )
    return data


def batch_spec(config: ConfigDict, stage: Stage) -> BatchSpec:
    """Returns the arrays of a padded batch of training.

    Args:
      config: the whole config, with the values of the stage.
      stage: the stage.
    """
    terms, spec = parse_objective(config), record_arrays(config.data.masking)
    for term in terms:
        spec = spec | term.objective.batch_spec(config, stage)
    if any(isinstance(term.objective, AuxiliaryObjective) for term in terms):
        spec = spec | PROGRESS_ARRAYS
    return spec | STREAM_ARRAYS if config.data.stream else spec


def packed_spec(config: ConfigDict, spec: BatchSpec) -> BatchSpec:
    """Returns the arrays of a packed training batch. `WORD_ARRAYS` are left out if no objective predicts words.

    Args:
      config: the whole config, with the values of the stage.
      spec: the arrays of a padded batch.
    """
    predicts = any(isinstance(term.objective, WordObjective) for term in parse_objective(config))
    return (spec if predicts else spec.without(WORD_ARRAYS)).packed()


def max_predictions_per_sequence(config: ConfigDict, stage: Stage) -> int:
    """Returns the maximum number of predicted tokens of a sequence; 0 if the batches have no predictions.

    Args:
      config: the whole config, with the values of the stage.
      stage: the stage.
    """
    for term in parse_objective(config):
        if isinstance(term.objective, WordObjective):
            return term.objective.predictions_per_sequence(config, stage)
    return stage.max_predictions_per_seq if config.data.masking == "static" else 0  # records store static masks


def packed_row_size(config: ConfigDict, stage: Stage) -> RowSize:
    """Returns the size of a packed row.

    Args:
      config: the whole config, with the values of the stage.
      stage: the stage.
    """
    predictions = 0
    for term in parse_objective(config):
        if isinstance(term.objective, WordObjective):
            predictions = term.objective.predictions_per_row(config, stage, MAX_SEQUENCES_PER_ROW)
    return RowSize(stage.length, MAX_SEQUENCES_PER_ROW, predictions)


def row_multiple(config: ConfigDict, mesh: Mesh) -> int:
    """Returns a divisor of the number of rows of every packed batch: microbatches * data-parallel devices."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * config.microbatches


def estimate_packed_rows(config: ConfigDict, mesh: Mesh, real_tokens_share: Sequence[float]) -> list[int]:
    """Returns an estimate of `Order.rows`, the number of rows of a packed batch, for each stage.

    Args:
      config: the whole config.
      mesh: the mesh of the run.
      real_tokens_share: for each stage of `config.stages`, the fraction of non-padding tokens in padded sequences.
    """
    if len(real_tokens_share) != len(config.stages):
        raise ValueError(
            f"real_tokens_share has {len(real_tokens_share)} values; packing needs one for each of the "
            f"{len(config.stages)} stages"
        )
    stages = stages_of(config)
    shares, rows = dict(zip(dict.fromkeys(stage.name for stage in stages), real_tokens_share)), []
    for stage in stages:
        groups = count_groups(stage.batch_size)
        multiple = math.lcm(groups, row_multiple(config_in(config, stage), mesh))
        rows.append(round_up(math.ceil(shares[stage.name] * stage.batch_size / groups) * groups, multiple))
    return rows
