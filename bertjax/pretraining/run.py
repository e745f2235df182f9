"""Pre-training as a `RunKind`: opens runs, compiles the stages for the planner, and writes the final report."""

import copy
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.progress import phase
from bertjax.config.resolved import Resolution, ResolvedConfig
from bertjax.config.stages import config_after, stages_of, steps_for, total_steps
from bertjax.data.records.manifest import fingerprint
from bertjax.distributed import hosts
from bertjax.distributed.mesh import local_copy, make_mesh
from bertjax.inference import fill_mask
from bertjax.interop import initialization
from bertjax.models.heads import BertForMaskedLM
from bertjax.objectives.parsing import parse_objective
from bertjax.objectives.parts.words import WordObjective
from bertjax.objectives.validate import validate_mesh
from bertjax.pretraining import adaptation, records
from bertjax.pretraining.compute_choice import compute_candidates, fastest_that_fits
from bertjax.pretraining.data import estimate_packed_rows, load_stages, planned_stages
from bertjax.pretraining.init_checkpoint import import_params, resize_embeddings, resolve, resolve_checkpoint
from bertjax.pretraining.task import Pretraining
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints.workdir import RunInfo, tokenizer_entry
from bertjax.training.loop import TrainingResult
from bertjax.training.planning import Planned, PlannedStage, Planning
from bertjax.training.run import Run, RunKind
from bertjax.training.scores import Scores
from bertjax.training.state import abstract_axes


class PretrainingPlanning(Planning):
    """Compiles the stages of pre-training without data."""

    def resolve(self, config: ConfigDict) -> Resolution:
        """Sets the model fields from `init_checkpoint`, if the config has `adapt.model`."""
        return resolve_checkpoint(config) if config.adapt.model else Resolution(ResolvedConfig.copy_of(config))

    def candidates(self, config: ConfigDict, platform: str, device_kind: str) -> Iterator[ConfigDict]:
        """Yields configs with the candidates for `remat` and `unroll`, see `compute_candidates`."""
        return compute_candidates(config, platform, device_kind)

    def open(self, config: ConfigDict, mesh: Mesh, real_tokens_share: Sequence[float]) -> Planned:
        """Returns the task and the training and evaluation functions of all stages, see `Planning.open`."""
        validate_mesh(config, mesh)
        rows = estimate_packed_rows(config, mesh, real_tokens_share) if config.packing else None
        data = planned_stages(config, mesh, rows)
        task = Pretraining(config, mesh, data)
        stages = [
            PlannedStage(
                stage_data.stage,
                stage_data.rows,
                stage_data.abstract_batch(),
                task.evaluator.eval_step(loss),
                task.evaluator.abstract_arguments(stage_data, loss),
            )
            for stage_data, loss in zip(data, task.losses)
        ]
        return Planned(task, stages)


class PretrainingKind(RunKind):
    """Pre-training as a kind of run, for `training.run`."""

    planning = PretrainingPlanning()

    def identity(self, config: ConfigDict) -> tuple[str, ...]:
        """Returns the fields that define the objectives."""
        return ("objective", "data.next_sentence")

    def resolve(self, config: ConfigDict, info: RunInfo | None) -> Resolution:
        """Sets the fields that an earlier run or `init_checkpoint` determines."""
        return resolve(config, info)

    def total_steps(self, config: ConfigDict, info: RunInfo | None) -> int:
        """Returns the steps of all stages."""
        return total_steps(config)

    def open(self, config: ResolvedConfig, workdir: epath.Path, info: RunInfo | None) -> Run:
        """Opens a run: finds or prepares the records, and chooses `remat` and `unroll` if they are "auto"."""
        mesh = make_mesh(config)
        validate_mesh(config, mesh)
        folder, tokenizer = records.find_or_prepare(config, workdir, is_new=info is None)
        return open_run(config, workdir, info, mesh, folder, tokenizer)

    def changes_of_data(self, config: ConfigDict, workdir: epath.Path, info: RunInfo) -> list[str]:
        """Returns clauses about changes of the records or the corpus since the run finished."""
        return records.changes_of_data(config, workdir, info)


KIND = PretrainingKind()


@dataclasses.dataclass(frozen=True)
class PretrainingRun(Run):
    """A run of pre-training that is ready to train.

    Attributes:
      workdir: the folder of the run.
      records: the folder of the records.
      previous: the info of the run that is resumed; None for a new run.
      heldout_text: the text for bits per byte; None if bits per byte are not measured.
    """

    task: Pretraining
    tokenizer: Tokenizer
    workdir: epath.Path
    records: epath.Path
    previous: RunInfo | None
    heldout_text: adaptation.HeldOutText | None

    def initial_params(self, params: dict) -> dict:
        """Returns the params of `init_checkpoint`, if the run starts from a checkpoint."""
        if not _starts_from_checkpoint(self.config, self.previous):
            return params
        axes = abstract_axes(self.task.init_params)
        return initialization.initialize(
            params,
            path=self.config.init_checkpoint,
            start=functools.partial(import_params, self.config),
            resize=functools.partial(resize_embeddings, self.config, axes, self.tokenizer),
        )

    def report(self, trained: TrainingResult) -> str:
        """Returns the report at the end of a run: held-out scores, bits per byte, and filled masks."""
        task, config, tokenizer, text = self.task, self.config, self.tokenizer, self.heldout_text
        params = local_copy(trained.state.eval_params, task.mesh)  # all hosts must call this
        if jax.process_index():
            return ""
        step = int(trained.state.step)  # less than `total_steps` if training stopped early
        loss, _ = task.loss_and_config(max(0, step - 1))
        model = BertForMaskedLM(loss.model.config, loss.model.compute)
        can_fill = any(isinstance(term.objective, WordObjective) and term.objective.fills_masks for term in loss.terms)
        filled = fill_mask.fill_masks(model, params, tokenizer, config.eval.fill_masks if can_fill else ())
        bits = text.report(text.score(model, params, tokenizer)) if text is not None else []
        return "\n".join(
            [format_heldout_scores(config_after(config, step), trained.scores), *bits, *map(fill_mask.describe, filled)]
        )

    def reopen(self, config: ResolvedConfig) -> "PretrainingRun":
        """Returns this run with another number of steps, and the same `remat` and `unroll`."""
        choice = {name: self.task.config[name] for name in ("remat", "unroll")}
        return open_run(config, self.workdir, self.previous, self.mesh, self.records, self.tokenizer, choice)


def _starts_from_checkpoint(config: ConfigDict, previous: RunInfo | None) -> bool:
    return bool(config.init_checkpoint) and _is_new(config, previous)


def _is_new(config: ConfigDict, previous: RunInfo | None) -> bool:
    return previous is None and not config.branch_from


def open_run(
    config: ResolvedConfig,
    workdir: epath.Path,
    previous: RunInfo | None,
    mesh: Mesh,
    folder: epath.Path,
    tokenizer: Tokenizer,
    compute_choice: dict[str, str] | None = None,
) -> PretrainingRun:
    """Opens a run on prepared records.

    Args:
      config: the whole config.
      workdir: the folder of the run.
      previous: the info of the run that is resumed; None for a new run.
      mesh: the device mesh.
      folder: the folder of the records.
      tokenizer: the tokenizer of the records.
      compute_choice: the values of `remat` and `unroll`, if the same run is reopened with another number of steps;
        None: choose the values.
    """
    if _starts_from_checkpoint(config, previous):
        initialization.compare_tokenizers(config.init_checkpoint, tokenizer)
    fill_mask.check_masks(config.eval.fill_masks, tokenizer, config.model.max_position_embeddings)
    with hosts.first_before_others("records counted"):
        is_new = _is_new(config, previous) and compute_choice is None
        text = _heldout_text(config, workdir, tokenizer, is_new)
        if config.packing and jax.process_index() == 0:
            phase("reading the lengths of the sequences")
        data = load_stages(config, mesh, folder, workdir, tokenizer)
    if compute_choice is None:  # all hosts compile together
        task_config = fastest_that_fits(config, mesh, data, mesh.devices.flat[0].platform)
    else:
        task_config = copy.deepcopy(config)
        task_config.update(compute_choice)
    task = Pretraining(task_config, mesh, data, tokenizer, text)
    info = RunInfo(
        config.copy_and_resolve_references(),
        tokenizer=tokenizer_entry(tokenizer),
        fingerprints={"records": fingerprint(folder)},
    )
    notes = _notes(config, task)
    return PretrainingRun(config, mesh, task, info, tokenizer, notes, workdir, folder, previous, text)


def _heldout_text(
    config: ConfigDict, workdir: epath.Path, tokenizer: Tokenizer, is_new: bool
) -> adaptation.HeldOutText | None:
    """Returns the text for bits per byte, which a new run samples; None if `eval.bits_windows` is 0."""
    if not config.eval.bits_windows:
        return None
    if is_new and jax.process_index() == 0:
        phase("measuring bits per byte of the checkpoint" if config.init_checkpoint else "choosing held-out text")
        adaptation.write_heldout_text(config, workdir, tokenizer)
    return adaptation.read_heldout_text(workdir)


def _notes(config: ConfigDict, task: Pretraining) -> list[str]:
    """Returns lines about the values chosen for "auto", and a warning if the warm-up is longer than the run."""
    fields = [field for field in ("remat", "unroll") if task.config[field] != config[field]]
    notes = [f"config.{field} = 'auto': this run uses {task.config[field]!r}" for field in fields]
    steps, tokens = config.optimizer.warmup_steps, config.optimizer.warmup_tokens
    if tokens:
        steps = steps_for(stages_of(config), tokens)
    if steps >= task.total_steps:
        field = "warmup_tokens" if tokens else "warmup_steps"
        notes.append(
            f"config.optimizer.{field} = {tokens or steps}: the run has {task.total_steps} steps and ends during the "
            "warm-up"
        )
    return notes


def format_heldout_scores(config: ConfigDict, scores: Scores | None) -> str:
    """Returns the held-out scores of the objectives of a config, with their baselines."""
    if scores is None:
        return "no scores, because there is no held-out data"
    values = {name: value for name, value in scores.scores.items() if value is not None}
    terms = [term for term in parse_objective(config) if f"{term.name}_loss" in values]
    return "\n".join(line for term in terms for line in term.objective.metrics.report(term.name, values))
