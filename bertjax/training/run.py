"""Executes a run, from config to report: pre-training, fine-tuning, or a trial of a search."""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.distributed.mesh import compute_for
from bertjax.text.tokenizer import Tokenizer
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import (
    Difference,
    RunInfo,
    append_command,
    delete_report,
    differences,
    raise_if_fatal,
    read_report,
    require_info,
    write_info,
    write_report,
)
from bertjax.training.hooks.hook import Hook, TrainingRun
from bertjax.training.loop import Trained, train
from bertjax.training.monitoring.memory import require_memory
from bertjax.training.planning import Planning
from bertjax.training.step import Program
from bertjax.training.task import Task


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to train.

    Args:
      config: complete, with the fields that the data and the checkpoint determine.
      info: is written beside the checkpoints.
      initialize: (random params) -> initial params of a new run; None keeps the random params.
      notes: lines to print before training.
      report: (result of `train`) -> text of the report. All hosts call it; the first prints it.
      reopen: (config) -> this run with another number of steps, on the same data.
    """

    config: object
    mesh: Mesh
    task: Task
    info: RunInfo
    tokenizer: Tokenizer
    initialize: Callable[[dict], dict] | None
    notes: list[str]
    report: Callable[[Trained], str]
    reopen: Callable[[object], "Run"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """The functions in which pre-training and fine-tuning differ. `info` is that of the run to resume, or None;
    for `adopt` and `total_steps` it is the parent's if a run branches off.

    Args:
      identity: (config) -> names of the fields that identify the task.
      adopt: (config, info) sets the config fields that `info` or else `config.init_checkpoint` determines.
      total_steps: (config, info) -> total steps; None if unknown before the data is read.
      open: (config, workdir, info) -> the run.
      changes_of_data: (config, workdir, info) -> what has changed of the data of a finished run, as far as it is there.
      planning: what the planner asks.
    """

    identity: Callable[[object], tuple[str, ...]]
    adopt: Callable[[object, RunInfo | None], None]
    total_steps: Callable[[object, RunInfo | None], int | None]
    open: Callable[[object, epath.Path, RunInfo | None], Run]
    changes_of_data: Callable[[object, epath.Path, RunInfo], list[str]]
    planning: Planning


def run(
    kind: Kind,
    config,
    workdir: epath.Path,
    fit: Callable[[Run], tuple[Run, Program | None]] = lambda run: (run, None),
    is_trial: bool = False,
    began: float | None = None,
    hooks: Sequence[Hook] = (),
) -> Trained | None:
    """Trains a validated config in `workdir`, resuming an earlier run if there is one, and prints the report.

    Args:
      kind: pre-training or fine-tuning.
      config: the validated config.
      workdir: the folder of the run.
      fit: (run) -> the run with its final number of steps, and a program to reuse; None to compile one.
      is_trial: a trial of a search, which cannot be extended once it has finished.
      began: when the command began, by `time.monotonic`; None: now.
      hooks: hooks that are called before the hooks of the config.

    Returns:
      The result of `train`; None if the run had already finished.

    Raises:
      UserError: the workdir holds an incompatible run, or a step runs out of memory.
    """
    began = time.monotonic() if began is None else began
    earlier = _find_earlier_run(kind, config, workdir)
    changes = earlier.changes(kind, RunInfo(config))
    if earlier.resumed is not None:
        if _print_if_finished(kind, config, workdir, earlier, changes):
            return None
    elif earlier.parent is not None:
        _check_branch(kind, config, earlier)

    opened, program = fit(kind.open(config, workdir, earlier.resumed))
    changes = earlier.changes(kind, opened.info)
    _print_first(*opened.notes)
    if earlier.parent:
        _print_first(f"branching off from {earlier.parent.workdir}, step {earlier.parent.step}")
    if changes:
        verb = "resuming" if earlier.resumed else "branching off"
        _print_first(f"{verb} with changed settings: {'; '.join(map(str, changes))}")
    try:
        trained = train(
            opened.task,
            opened.config,
            workdir,
            opened.mesh,
            opened.initialize,
            program,
            earlier.parent,
            hooks=(_BeginWorkdir(opened), *hooks),
            resumable_at_end=not is_trial,
            began=began,
        )
    except jax.errors.JaxRuntimeError as error:
        require_memory(error, opened.config, opened.task, opened.mesh, kind.planning)
        raise
    _report(opened, workdir, trained)
    return trained


def _print_first(*lines: str) -> None:
    """Prints lines on the first host."""
    if jax.process_index() == 0 and lines:
        print("\n".join(lines), flush=True)


@dataclasses.dataclass(frozen=True)
class _EarlierRun:
    """The run that a workdir holds, or the run from which a new run branches off.

    Attributes:
      config: the config of this run.
      workdir: the folder of the earlier run; if there is none, of this run.
      resumed: the info of the run to resume.
      resumed_step: the step of its latest checkpoint.
      origin: `resumed`, or the info of the parent.
      parent: the checkpoint of the parent.
    """

    config: ConfigDict
    workdir: epath.Path
    resumed: RunInfo | None
    resumed_step: int | None
    origin: RunInfo | None
    parent: checkpoint.Parent | None

    def changes(self, kind: Kind, info: RunInfo) -> list[Difference]:
        """Returns the differences from the earlier run. Raises `UserError` if one prevents resuming or branching."""
        if self.origin is None:
            return []
        changes = differences(self.origin, info, kind.identity(self.config))
        if self.parent:
            branch = self.config.branch_from
            changes = [change for change in changes if change.field != "branch_from"]
            for field, old, new, is_fatal in changes:
                if is_fatal:
                    raise UserError(f"config.branch_from = {branch!r}: {field} is {old!r} there, here {new!r}")
        raise_if_fatal(self.workdir, changes)
        return changes


def _find_earlier_run(kind: Kind, config, workdir: epath.Path) -> _EarlierRun:
    """Finds the run to resume or the parent, and sets the config fields that it determines."""
    step, parent = checkpoint.latest_intact_step(workdir), None
    resumed = origin = require_info(workdir) if step is not None else None
    if resumed is None and config.get("branch_from"):
        parent = checkpoint.find_parent(config.branch_from)
        config.branch_from = f"{parent.workdir}@{parent.step}"
        origin = require_info(parent.workdir)
    elif resumed is not None and config.get("branch_from", "").endswith("@latest"):
        config.branch_from = resumed.config.branch_from  # the step at which the run branched off
    origin_workdir = parent.workdir if parent else workdir
    if origin is not None:
        if origin.config.task != config.task:
            raise_if_fatal(origin_workdir, [Difference("task", origin.config.task, config.task, is_fatal=True)])
        _keep_sizes(config, origin)
    kind.adopt(config, origin)
    return _EarlierRun(config, origin_workdir, resumed, step, origin, parent)


def _check_branch(kind: Kind, config, earlier: _EarlierRun) -> None:
    """Raises `UserError` if the parent has done all steps of this config."""
    total = kind.total_steps(config, earlier.origin)
    if earlier.parent.step >= total:
        raise UserError(
            f"config.branch_from = {config.branch_from!r}: the stages of this config end at step {total}; add steps"
        )


def _print_if_finished(kind: Kind, config, workdir: epath.Path, earlier: _EarlierRun, changes: list) -> bool:
    """Prints the report of a run that has finished. Returns whether it has.

    Raises `UserError` if training cannot resume from the latest checkpoint.
    """
    step, total = earlier.resumed_step, kind.total_steps(config, earlier.resumed)
    checkpoint.check_resumable(workdir, step, total)
    has_stopped = checkpoint.has_stopped(checkpoint.read_scores(workdir, step), config.eval.patience)
    report = read_report(workdir)
    if report is None or not (step == total or has_stopped):
        return False
    steps = f"{total} steps" if step == total else f"{step} of {total} steps"
    _print_first(f"already finished: {steps}, in {workdir}", report)
    if changes:
        settings = "; ".join(map(str, changes))
        _print_first(f"this run was trained with other settings: {settings}. For a new run choose another --workdir")
    if jax.process_index() == 0 and (news := kind.changes_of_data(config, workdir, earlier.resumed)):
        _print_first(
            f"the data is no longer that of this run: {'; '.join(news)}. For a new run choose another --workdir"
        )
    return True


class _BeginWorkdir(Hook):
    """Writes `config.json` once the state has been restored or initialized, and prints how training starts."""

    def __init__(self, opened: Run):
        self._opened = opened

    def on_start(self, run: TrainingRun) -> None:
        opened = self._opened
        if run.is_first_host:
            delete_report(run.workdir)  # the report of the run before it was extended
            write_info(run.workdir, dataclasses.replace(opened.info, total_steps=run.total_steps), opened.tokenizer)
            append_command(run.workdir)
        run.print(f"training in {run.workdir}" + (f", from step {run.start_step}" if run.start_step else ""))
        if run.config.dtype == "auto" and compute_for("auto").casts_factors:
            run.print("dtype = 'auto': products take bfloat16, which this processor multiplies faster than float32")
        if run.program.saves:
            run.print(run.program.saves)


def _report(opened: Run, workdir: epath.Path, trained: Trained) -> None:
    """Prints the report and writes it to the workdir. All hosts call it."""
    text, step, total = opened.report(trained), int(trained.state.step), opened.task.total_steps
    if step < total:
        text += f"\nstopped early, at step {step} of {total}"
        if checkpoint.has_stopped(trained.scores, opened.config.eval.patience):
            waited = trained.scores.waited
            evaluations = "1 evaluation" if waited == 1 else f"{waited} evaluations"
            text += f": {evaluations} without a better score"
    if jax.process_index() == 0:
        write_report(workdir, text)
    _print_first(text)


def _keep_sizes(config, origin: RunInfo) -> None:
    """Sets the sizes that follow the width to those of an earlier run of this width, unless the user has set them.

    In older runs, these sizes did not follow the width.
    """
    model, before = config.model, origin.config.model
    if model.get("hidden_size") == before.get("hidden_size") and "model.hidden_size" in config.overrides:
        for name in ("intermediate_size", "num_attention_heads"):
            if name in model and name in before and f"model.{name}" not in config.overrides:
                model[name] = before[name]
