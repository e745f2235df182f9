"""Executes a run (pre-training, fine-tuning, or a trial of a sweep), from the config to the report."""

import abc
import copy
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.resolved import Resolution, ResolvedConfig
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
    write_report_text,
)
from bertjax.training.hooks.hook import Hook, TrainingRun
from bertjax.training.loop import TrainingResult, train_task
from bertjax.training.monitoring.memory import raise_if_out_of_memory
from bertjax.training.planning import Planning
from bertjax.training.step import Program
from bertjax.training.task import Task


@dataclasses.dataclass(frozen=True)
class Run(abc.ABC):
    """A run that is ready to train.

    Attributes:
      config: the resolved config.
      mesh: the devices.
      task: the task.
      info: the content of `config.json` in the workdir.
      tokenizer: the tokenizer; None if the run has none.
      notes: lines to print before training.
    """

    config: ResolvedConfig
    mesh: Mesh
    task: Task
    info: RunInfo
    tokenizer: Tokenizer | None
    notes: list[str]

    def __post_init__(self) -> None:
        """Raises `TypeError` if the config is not resolved."""
        if not isinstance(self.config, ResolvedConfig):
            raise TypeError("a run needs a resolved config: call RunKind.resolve")

    @abc.abstractmethod
    def initial_params(self, params: dict) -> dict:
        """Returns the initial params of a new run; `params` are random."""

    @abc.abstractmethod
    def report(self, trained: TrainingResult) -> str:
        """Returns the text of the report. All hosts call this method, and the first host prints the text."""

    @abc.abstractmethod
    def reopen(self, config: ResolvedConfig) -> "Run":
        """Returns this run on the same data with a config that has another number of steps."""


class RunKind(abc.ABC):
    """Pre-training or fine-tuning. The methods are the parts of a run that differ between the two kinds.

    Attributes:
      planning: the functions that describe a run of this kind to the memory and time planner.
    """

    planning: Planning

    @abc.abstractmethod
    def identity(self, config: ConfigDict) -> tuple[str, ...]:
        """Returns the names of the config fields that identify the task. A resumed run must have the same values."""

    @abc.abstractmethod
    def resolve(self, config: ConfigDict, info: RunInfo | None) -> Resolution:
        """Returns the config with the fields that an earlier run or `config.init_checkpoint` determines.

        Args:
          config: the validated config of the user, which is not changed.
          info: the content of `config.json` of the run to resume or of the parent; None for a new run.
        """

    @abc.abstractmethod
    def total_steps(self, config: ConfigDict, info: RunInfo | None) -> int | None:
        """Returns the number of steps of the whole run; None if it is unknown before the data is read.

        Args:
          config: the config.
          info: the content of `config.json` of the run to resume or of the parent; None for a new run.
        """

    @abc.abstractmethod
    def open(self, config: ResolvedConfig, workdir: epath.Path, info: RunInfo | None) -> Run:
        """Reads the data and makes the task.

        Args:
          config: the resolved config.
          workdir: the folder of the run.
          info: the content of `config.json` of the run to resume; None for a new run.
        """

    @abc.abstractmethod
    def changes_of_data(self, config: ConfigDict, workdir: epath.Path, info: RunInfo) -> list[str]:
        """Describes the changes of the data since a run finished, one clause each. Missing data counts as unchanged."""


def run_training(
    kind: RunKind,
    config: ConfigDict,
    workdir: epath.Path,
    fit: Callable[[Run], tuple[Run, Program | None]] = lambda run: (run, None),
    is_trial: bool = False,
    start_time: float | None = None,
    hooks: Sequence[Hook] = (),
) -> TrainingResult | None:
    """Trains a validated config in `workdir`, and prints the report. Resumes the run if the folder has a checkpoint.

    Args:
      kind: pre-training or fine-tuning.
      config: the validated config.
      workdir: the folder of the run.
      fit: (run) -> (the run with the final number of steps, a program to reuse or None). A time budget changes the
        number of steps. By default, the run keeps its number of steps.
      is_trial: whether the run is a trial of a sweep, whose last checkpoint has params only.
      start_time: the time at which the command started, in seconds of `time.monotonic`; None for now.
      hooks: hooks that are called before the hooks of the config.

    Returns:
      The result of `train_task`; None if the run was already finished.

    Raises:
      UserError: the workdir holds an incompatible run, or a step runs out of memory.
    """
    start_time = time.monotonic() if start_time is None else start_time
    config = copy.deepcopy(config)
    earlier = _find_earlier_run(config, workdir)
    resumed = None if earlier is None or earlier.is_parent else earlier.info
    config, decisions = kind.resolve(config, None if earlier is None else earlier.info)
    _print_first(*decisions)
    changes = _changes(kind, config, earlier, RunInfo(config))
    if earlier is not None and earlier.is_parent:
        _check_branch(kind, config, earlier)
    elif earlier is not None and _print_if_finished(kind, config, earlier, changes):
        return None

    opened, program = fit(kind.open(config, workdir, resumed))
    changes = _changes(kind, config, earlier, opened.info)
    _print_first(*opened.notes)
    parent = checkpoint.Parent(earlier.workdir, earlier.step) if earlier and earlier.is_parent else None
    if parent:
        _print_first(f"branching off from {parent.workdir}, step {parent.step}")
    if changes:
        verb = "branching off" if parent else "resuming"
        _print_first(f"{verb} with changed settings: {'; '.join(map(str, changes))}")
    try:
        trained = train_task(
            opened.task,
            opened.config,
            workdir,
            opened.mesh,
            opened.initial_params,
            program,
            parent,
            hooks=(_WriteRunInfo(opened), *hooks),
            save_final_opt_state=not is_trial,
            start_time=start_time,
        )
    except jax.errors.JaxRuntimeError as error:
        raise_if_out_of_memory(error, opened.config, opened.task, opened.mesh, kind.planning)
        raise
    _report(opened, workdir, trained)
    return trained


def _print_first(*lines: str) -> None:
    """Prints lines on the first host."""
    if jax.process_index() == 0 and lines:
        print("\n".join(lines), flush=True)


@dataclasses.dataclass(frozen=True)
class _EarlierRun:
    """The run to resume, or the parent of a new run.

    Attributes:
      workdir: the folder of the earlier run.
      info: the content of `config.json` in this folder.
      step: the step of the checkpoint from which training continues.
      is_parent: whether the earlier run is the parent (`config.branch_from`) instead of the run to resume.
    """

    workdir: epath.Path
    info: RunInfo
    step: int
    is_parent: bool


def _find_earlier_run(config: ConfigDict, workdir: epath.Path) -> _EarlierRun | None:
    """Returns the run to resume, or else the parent; None for a new run without a parent.

    Replaces "@latest" in `config.branch_from` by a step, and sets the model sizes that the earlier run determines.

    Raises:
      UserError: the earlier run trained another task.
    """
    step, branch = checkpoint.latest_intact_step(workdir), config.get("branch_from", "")
    if step is not None:
        earlier = _EarlierRun(workdir, require_info(workdir), step, is_parent=False)
        if branch.endswith("@latest"):
            config.branch_from = earlier.info.config.branch_from  # WORKDIR@STEP instead of WORKDIR@latest
    elif branch:
        parent = checkpoint.find_parent(branch)
        config.branch_from = f"{parent.workdir}@{parent.step}"
        earlier = _EarlierRun(parent.workdir, require_info(parent.workdir), parent.step, is_parent=True)
    else:
        return None
    if (task := earlier.info.config.task) != config.task:
        raise_if_fatal(earlier.workdir, [Difference("task", task, config.task, is_fatal=True)])
    _keep_sizes(config, earlier.info)
    return earlier


def _changes(kind: RunKind, config: ConfigDict, earlier: _EarlierRun | None, info: RunInfo) -> list[Difference]:
    """Returns the differences from an earlier run. Raises `UserError` for a difference that prevents training."""
    if earlier is None:
        return []
    changes = differences(earlier.info, info, kind.identity(config))
    if earlier.is_parent:
        branch = config.branch_from
        changes = [change for change in changes if change.field != "branch_from"]
        for field, old, new, is_fatal in changes:
            if is_fatal:
                raise UserError(f"config.branch_from = {branch!r}: {field} = {new!r} must be {old!r}, as in the parent")
    raise_if_fatal(earlier.workdir, changes)
    return changes


def _check_branch(kind: RunKind, config: ConfigDict, parent: _EarlierRun) -> None:
    """Raises `UserError` if the parent's checkpoint is at or after the last step of this config."""
    total = kind.total_steps(config, parent.info)
    if total is not None and parent.step >= total:
        raise UserError(
            f"config.branch_from = {config.branch_from!r}: must be before step {total}, where the stages of this "
            "config end; add steps to config.stages"
        )


def _print_if_finished(kind: RunKind, config: ConfigDict, earlier: _EarlierRun, changes: list[Difference]) -> bool:
    """Prints the report of a finished run. Returns whether the run is finished.

    Raises:
      UserError: the latest checkpoint is past the last step, or training cannot resume from this checkpoint.
    """
    workdir, step, total = earlier.workdir, earlier.step, kind.total_steps(config, earlier.info)
    checkpoint.check_resumable(workdir, step, total)
    has_stopped_early = checkpoint.has_stopped_early(checkpoint.read_scores(workdir, step), config.eval.patience)
    report = read_report(workdir) if step == total or has_stopped_early else None
    if report is None:
        return False
    steps = f"{total} steps" if step == total else f"{step} of {total} steps"
    _print_first(f"already finished: {steps}, in {workdir}", report)
    if changes:
        settings = "; ".join(map(str, changes))
        _print_first(f"this run was trained with other settings: {settings}. For a new run choose another --workdir")
    if jax.process_index() == 0 and (data_changes := kind.changes_of_data(config, workdir, earlier.info)):
        _print_first(
            f"the data has changed since this run: {'; '.join(data_changes)}. For a new run choose another --workdir"
        )
    return True


class _WriteRunInfo(Hook):
    """Writes `config.json` once the state has been restored or initialized, and prints how training starts."""

    def __init__(self, opened: Run):
        self._opened = opened

    def on_start(self, run: TrainingRun) -> None:
        opened = self._opened
        if run.is_first_host:
            delete_report(run.workdir)  # The run may be extended after its report.
            write_info(run.workdir, dataclasses.replace(opened.info, total_steps=run.total_steps), opened.tokenizer)
            append_command(run.workdir)
        run.print(f"training in {run.workdir}" + (f", from step {run.start_step}" if run.start_step else ""))
        if run.config.dtype == "auto" and compute_for("auto").casts_factors:
            run.print("config.dtype = 'auto': matrix products use bfloat16, which is faster than float32 on this CPU")
        if run.program.frozen_summary:
            run.print(run.program.frozen_summary)


def _report(opened: Run, workdir: epath.Path, trained: TrainingResult) -> None:
    """Prints the report and writes the report to the workdir. All hosts call this function."""
    text, step, total = opened.report(trained), int(trained.state.step), opened.task.total_steps
    if step < total:
        text += f"\nstopped early, at step {step} of {total}"
        if trained.scores and checkpoint.has_stopped_early(trained.scores, opened.config.eval.patience):
            count = trained.scores.waited
            text += f": {count} evaluation{'s' * (count != 1)} without a better score"
    if jax.process_index() == 0:
        write_report_text(workdir, text)
    _print_first(text)


def _keep_sizes(config: ConfigDict, earlier: RunInfo) -> None:
    """Copies `intermediate_size` and `num_attention_heads` of an earlier run, unless the user has set them.

    The flag `--config.model.hidden_size` also sets these two fields. In older versions, it did not. Without the copy,
    the command of an older run would therefore give other sizes.
    """
    model, before = config.model, earlier.config.model
    if model.get("hidden_size") == before.get("hidden_size") and "model.hidden_size" in config.overrides:
        for name in ("intermediate_size", "num_attention_heads"):
            if name in model and name in before and f"model.{name}" not in config.overrides:
                model[name] = before[name]
