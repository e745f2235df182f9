"""Pre-training as a `RunKind`: opens a run on its records, plans it, and reports at the end."""

import copy
import functools
from collections.abc import Iterator, Sequence

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.progress import phase
from bertjax.config.stages import config_after, stages_of, steps_for, total_steps
from bertjax.data.records.manifest import fingerprint
from bertjax.distributed import hosts
from bertjax.distributed.mesh import local_copy, make_mesh
from bertjax.inference import fill_mask
from bertjax.interop import pretrained
from bertjax.models.heads import BertForMaskedLM
from bertjax.objectives.parsing import parse_objective
from bertjax.objectives.parts.words import WordObjective
from bertjax.objectives.validate import validate_mesh
from bertjax.pretraining import adaptation, records
from bertjax.pretraining.compute_choice import compute_candidates, fastest_that_fits
from bertjax.pretraining.data import estimate_packed_rows, load_stages, planned_stages
from bertjax.pretraining.init_checkpoint import adopt, adopt_checkpoint, import_params, resize_embeddings
from bertjax.pretraining.task import Pretraining
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints.workdir import RunInfo, tokenizer_entry
from bertjax.training.loop import Trained
from bertjax.training.planning import Planned, PlannedStage, Planning
from bertjax.training.run import Run, RunKind
from bertjax.training.scores import Scores
from bertjax.training.state import abstract_axes


class PretrainingPlanning(Planning):
    """Compiles the stages of pre-training without data."""

    def adopt(self, config: ConfigDict) -> None:
        """Reads the model of `init_checkpoint`, if the run adapts it."""
        if config.adapt.model:
            adopt_checkpoint(config)

    def candidates(self, config: ConfigDict, platform: str, device_kind: str) -> Iterator[ConfigDict]:
        """Yields the choices for `remat` and `unroll`."""
        return compute_candidates(config, platform, device_kind)

    def open(self, config: ConfigDict, mesh: Mesh, real_tokens_share: Sequence[float]) -> Planned:
        """Returns the programs of all stages."""
        validate_mesh(config, mesh)
        rows = estimate_packed_rows(config, mesh, real_tokens_share) if config.packing else None
        data = planned_stages(config, mesh, rows)
        task = Pretraining(config, mesh, data)
        stages = [
            PlannedStage(
                stage.stage,
                stage.rows,
                stage.abstract_batch(),
                task.evaluator.eval_step(loss),
                task.evaluator.arguments(stage, loss),
            )
            for stage, loss in zip(data, task.losses)
        ]
        return Planned(task, stages)


class PretrainingKind(RunKind):
    """Pre-training, as `training.run` executes it."""

    planning = PretrainingPlanning()

    def identity(self, config: ConfigDict) -> tuple[str, ...]:
        """Returns the fields that identify the objective."""
        return ("objective", "data.next_sentence")

    def adopt(self, config: ConfigDict, info: RunInfo | None) -> None:
        """Sets the fields that an earlier run or `init_checkpoint` determines."""
        adopt(config, info)

    def total_steps(self, config: ConfigDict, info: RunInfo | None) -> int:
        """Returns the steps of all stages."""
        return total_steps(config)

    def open(self, config: ConfigDict, workdir: epath.Path, info: RunInfo | None) -> Run:
        """Opens a run: prepares its records if there are none, and chooses how to compute."""
        mesh = make_mesh(config)
        validate_mesh(config, mesh)
        folder, tokenizer = records.find_or_prepare(config, workdir, is_new=info is None)
        return _open_with(config, workdir, info, mesh, folder, tokenizer)

    def changes_of_data(self, config: ConfigDict, workdir: epath.Path, info: RunInfo) -> list[str]:
        """Returns clauses about records or a corpus that have changed."""
        return records.changes_of_data(config, workdir, info)


KIND = PretrainingKind()


def _open_with(
    config: ConfigDict,
    workdir: epath.Path,
    before: RunInfo | None,
    mesh: Mesh,
    folder: epath.Path,
    tokenizer: Tokenizer,
    way: dict[str, str] | None = None,
) -> Run:
    """Opens a run on records.

    Args:
      config: the whole config.
      workdir: the folder of the run.
      before: the earlier run that is resumed, if there is one.
      mesh: the devices.
      folder: the folder of the records.
      tokenizer: the tokenizer of the records.
      way: `remat` and `unroll`, if the run was opened before with another number of steps; None: choose them.
    """
    is_new = before is None and not config.branch_from
    starts_from_checkpoint = bool(config.init_checkpoint) and is_new
    if starts_from_checkpoint:
        pretrained.check_tokenizer(config.init_checkpoint, tokenizer)
    fill_mask.check(config.eval.fill_masks, tokenizer, config.model.max_position_embeddings)
    with hosts.first_before_others("records counted"):
        text = _heldout_text(config, workdir, tokenizer, is_new=is_new and way is None)
        if config.packing and jax.process_index() == 0:
            phase("reading the lengths of the sequences")
        data = load_stages(config, mesh, folder, workdir, tokenizer)
    if way is None:
        computed = fastest_that_fits(config, mesh, data, mesh.devices.flat[0].platform)  # all hosts compile together
    else:
        computed = copy.deepcopy(config)
        computed.update(way)
    task = Pretraining(computed, mesh, data, tokenizer, text)
    initialize = None
    if starts_from_checkpoint:
        initialize = functools.partial(
            pretrained.initialize,
            path=config.init_checkpoint,
            start=functools.partial(import_params, config),
            resize=functools.partial(resize_embeddings, config, abstract_axes(task.init_params), tokenizer),
        )
    info = RunInfo(
        config.copy_and_resolve_references(),
        tokenizer=tokenizer_entry(tokenizer),
        fingerprints={"records": fingerprint(folder)},
    )
    end_report = functools.partial(_end_report, config, task, tokenizer, text)
    reopen = functools.partial(
        _open_with, workdir=workdir, before=before, mesh=mesh, folder=folder, tokenizer=tokenizer,
        way={name: computed[name] for name in ("remat", "unroll")},
    )  # fmt: skip
    return Run(config, mesh, task, info, tokenizer, initialize, _notes(config, task), end_report, reopen)


def _heldout_text(
    config: ConfigDict, workdir: epath.Path, tokenizer: Tokenizer, is_new: bool
) -> adaptation.HeldOutText | None:
    """Returns the text for bits per byte; None if they are not measured. A new run chooses the text."""
    if not config.eval.bits_windows:
        return None
    if is_new and jax.process_index() == 0:
        phase("measuring bits per byte of the checkpoint" if config.init_checkpoint else "choosing held-out text")
        adaptation.begin(config, workdir, tokenizer)
    return adaptation.read(workdir)


def _notes(config: ConfigDict, task: Pretraining) -> list[str]:
    """Returns lines about the choices for "auto", and about a warm-up that is longer than the run."""
    fields = [field for field in ("remat", "unroll") if task.config[field] != config[field]]
    notes = [f"config.{field} = 'auto': {task.config[field]}" for field in fields]
    steps, tokens = config.optimizer.warmup_steps, config.optimizer.warmup_tokens
    if tokens:
        steps = steps_for(stages_of(config), tokens)
    if steps >= task.total_steps:
        field = "warmup_tokens" if tokens else "warmup_steps"
        notes.append(
            f"config.optimizer.{field} = {tokens or steps}: the {task.total_steps} steps end before the warm-up does"
        )
    return notes


def _end_report(
    config: ConfigDict, task: Pretraining, tokenizer: Tokenizer, text: adaptation.HeldOutText | None, trained: Trained
) -> str:
    """Returns the report at the end of a run: held-out scores, bits per byte, and filled masks."""
    params = local_copy(trained.state.eval_params, task.mesh)  # all hosts must call this
    if jax.process_index():
        return ""
    step = int(trained.state.step)  # before the last step, if training ended early
    loss, _ = task.loss_and_config(max(0, step - 1))
    model = BertForMaskedLM(loss.model.config, loss.model.compute)
    can_fill = any(isinstance(term.objective, WordObjective) and term.objective.fills_masks for term in loss.terms)
    filled = fill_mask.fill_masks(model, params, tokenizer, config.eval.fill_masks if can_fill else ())
    bits = text.report(text.measured(model, params, tokenizer)) if text is not None else []
    return "\n".join([report(config_after(config, step), trained.scores), *bits, *map(fill_mask.describe, filled)])


def report(config: ConfigDict, scores: Scores | None) -> str:
    """Returns the held-out scores of the objectives of a config, with their baselines."""
    if scores is None:
        return "no held-out data, so no scores"
    values = {name: value for name, value in scores.scores.items() if value is not None}
    terms = [term for term in parse_objective(config) if f"{term.name}_loss" in values]
    return "\n".join(line for term in terms for line in term.objective.metrics.report(term.name, values))
