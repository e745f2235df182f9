"""Executes a run, from config to report: pre-training, fine-tuning, or a trial of a search."""

import dataclasses
import time
from collections.abc import Callable

import jax
from etils import epath
from jax.sharding import Mesh

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
) -> Trained | None:
    """Trains a validated config in `workdir`, resuming an earlier run if there is one, and prints the report.

    Args:
      fit: (run) -> the run with the steps that it is to have, and a program to reuse; None to compile one.
      is_trial: a trial of a search, which cannot be extended once it has finished.
      began: when the command began, by `time.monotonic`; None: now.

    Returns the result of `train`; None if the run had already finished.
    Raises `UserError` if the workdir holds an incompatible run, or if a step runs out of memory.
    """

    def say(*lines: str) -> None:
        if jax.process_index() == 0 and lines:
            print("\n".join(lines), flush=True)

    began = time.monotonic() if began is None else began

    # Compare with the earlier run, if any.
    done = checkpoint.latest_intact_step(workdir)
    before, parent = require_info(workdir) if done is not None else None, None
    if before is None and config.get("branch_from"):
        parent = checkpoint.find_parent(config.branch_from)
        config.branch_from = f"{parent.workdir}@{parent.step}"
    elif before is not None and config.get("branch_from", "").endswith("@latest"):  # the step at which it branched off
        config.branch_from = before.config.branch_from
    origin, its_workdir = (require_info(parent.workdir), parent.workdir) if parent else (before, workdir)
    if origin is not None and origin.config.task != config.task:
        raise_if_fatal(its_workdir, [Difference("task", origin.config.task, config.task, is_fatal=True)])
    if origin is not None:
        _keep_sizes(config, origin)
    kind.adopt(config, origin)

    def changes(info: RunInfo) -> list[Difference]:
        """Returns what differs from the earlier run or the parent. Raises `UserError` if one prevents going on."""
        found = differences(origin, info, kind.identity(config)) if origin is not None else []
        found = [each for each in found if not (parent and each.field == "branch_from")]
        for field, old, new, is_fatal in found if parent else ():
            if is_fatal:
                raise UserError(f"config.branch_from = {config.branch_from!r}: {field} is {old!r} there, here {new!r}")
        raise_if_fatal(its_workdir, found)
        return found

    changed = changes(RunInfo(config))
    if parent and parent.step >= (total := kind.total_steps(config, origin)):
        raise UserError(
            f"config.branch_from = {config.branch_from!r}: the stages of this config end at step {total}; add steps"
        )
    if before is not None:
        # Stop if it has finished.
        total = kind.total_steps(config, before)
        checkpoint.check_resumable(workdir, done, total)
        has_stopped = checkpoint.has_stopped(checkpoint.read_scores(workdir, done), config.eval.patience)
        if (done == total or has_stopped) and (finished := read_report(workdir)) is not None:
            steps = f"{total} steps" if done == total else f"{done} of {total} steps"
            say(f"already finished: {steps}, in {workdir}", finished)
            if changed:
                settings = "; ".join(map(str, changed))
                say(f"this run was trained with other settings: {settings}. For a new run choose another --workdir")
            if jax.process_index() == 0 and (news := kind.changes_of_data(config, workdir, before)):
                say(
                    f"the data is no longer that of this run: {'; '.join(news)}. For a new run choose another --workdir"
                )
            return None

    # Data and model.
    opened = kind.open(config, workdir, before)
    opened, program = fit(opened)
    changed = changes(opened.info)
    say(*opened.notes)
    if parent:
        say(f"branching off from {parent.workdir}, step {parent.step}")
    if changed:
        say(f"{'resuming' if before else 'branching off'} with changed settings: {'; '.join(map(str, changed))}")

    def on_start(step: int) -> None:
        """Writes `config.json` only once the state has been restored or initialized."""
        if jax.process_index() == 0:
            delete_report(workdir)  # the report of the run before it was extended
            write_info(workdir, dataclasses.replace(opened.info, total_steps=opened.task.total_steps), opened.tokenizer)
            append_command(workdir)
        say(f"training in {workdir}" + (f", from step {step}" if step else ""))
        if opened.config.dtype == "auto" and compute_for("auto").casts_factors:
            say("dtype = 'auto': products take bfloat16, which this processor multiplies faster than float32")

    # Train and report.
    try:
        trained = train(
            opened.task,
            opened.config,
            workdir,
            opened.mesh,
            opened.initialize,
            program,
            parent,
            on_start=on_start,
            resumable_at_end=not is_trial,
            began=began,
        )
    except jax.errors.JaxRuntimeError as error:
        require_memory(error, opened.config, opened.task, opened.mesh, kind.planning)
        raise
    text, step, total = opened.report(trained), int(trained.state.step), opened.task.total_steps
    if step < total:
        waited = trained.scores.waited
        evaluations = "1 evaluation" if waited == 1 else f"{waited} evaluations"
        text += f"\nstopped early, at step {step} of {total}: {evaluations} without a better score"
    if jax.process_index() == 0:
        write_report(workdir, text)
    say(text)
    return trained


def _keep_sizes(config, origin: RunInfo) -> None:
    """Sets the sizes that follow the width to those of an earlier run of this width, unless the user has set them.

    In older runs, these sizes did not follow the width.
    """
    model, before = config.model, origin.config.model
    if model.get("hidden_size") == before.get("hidden_size") and "model.hidden_size" in config.overrides:
        for name in ("intermediate_size", "num_attention_heads"):
            if name in model and name in before and f"model.{name}" not in config.overrides:
                model[name] = before[name]
