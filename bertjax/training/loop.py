"""The training loop, shared by all tasks."""

import collections
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.progress import phase
from bertjax.distributed.transfers import STEPS_IN_FLIGHT, on_devices
from bertjax.training import signals
from bertjax.training.checkpoints.checkpoint import (
    Checkpoints,
    Parent,
    check_resumable,
    has_stopped,
    is_resumable,
    restore_from,
)
from bertjax.training.hooks.checkpoints import SaveCheckpoints
from bertjax.training.hooks.divergence import Divergence
from bertjax.training.hooks.evaluation import Evaluation
from bertjax.training.hooks.hook import Hook, TrainingRun
from bertjax.training.hooks.metrics import ReportMetrics
from bertjax.training.hooks.profile import Profile
from bertjax.training.hooks.recurrent_memory import RecurrentMemory
from bertjax.training.hooks.registry import make_hooks
from bertjax.training.hooks.watchdog import Watchdog
from bertjax.training.monitoring.clocks import Clocks
from bertjax.training.monitoring.memory import require_room
from bertjax.training.optim.schedules import schedule_of
from bertjax.training.scores import Scores
from bertjax.training.state import TrainState
from bertjax.training.step import Program, make_program, put_hyperparameters
from bertjax.training.task import Task


class Trained(NamedTuple):
    """The result of training. `scores` (last step) and `best` (best checkpoint) are None without held-out data."""

    state: TrainState
    scores: Scores | None
    best_step: int | None
    best: Scores | None


def train(
    task: Task,
    config: ConfigDict,
    workdir: epath.PathLike,
    mesh: Mesh,
    initialize: Callable[[dict], dict] | None = None,
    program: Program | None = None,
    parent: Parent | None = None,
    *,
    hooks: Sequence[Hook] = (),
    resumable_at_end: bool = True,
    began: float | None = None,
) -> Trained:
    """Trains to `task.total_steps`, and resumes from the latest checkpoint in `workdir`.

    Training ends early after `config.eval.patience` evaluations in a row without a better score, or if a hook calls
    `run.end`. Ctrl-C and SIGTERM save a checkpoint.

    Args:
      task: the task.
      config: the config of the run.
      workdir: the folder of the run.
      mesh: the devices.
      initialize: (random params) -> initial params of a new run.
      program: a program to reuse instead of compiling.
      parent: the checkpoint of another run; a new run begins with its state.
      hooks: hooks that are called before the hooks of the config.
      resumable_at_end: saves the optimizer state with the last checkpoint too, so that training can be extended.
      began: when the run began in this process, by `time.monotonic`; None: now.

    Returns:
      The last state and its scores, and the best step and its scores.

    Raises:
      KeyboardInterrupt: after a signal.
      Diverged: the loss or the gradient norm is not finite, more often in a row than `config.optimizer.skip_nonfinite`.
    """
    clocks, compiles = Clocks(began), program is None
    program = program or make_program(task, config, mesh)
    require_room(config, program)
    checkpoints = Checkpoints(workdir, config.checkpoint.keep, config.checkpoint.keep_every)
    start, state = _restore_or_initialize(task, config, workdir, program, checkpoints, initialize, parent)
    run = TrainingRun(
        config,
        epath.Path(workdir),
        mesh,
        task,
        state,
        start,
        is_first_host=jax.process_index() == 0,
        program=program,
        schedule=schedule_of(config, task.total_steps),
        checkpoints=checkpoints,
        clocks=clocks,
        scores=checkpoints.scores(start),
    )
    del state  # The first step donates it.
    evaluation = Evaluation()
    built_in = RecurrentMemory(), Divergence(), ReportMetrics(), SaveCheckpoints(resumable_at_end), evaluation
    run.hooks = (*hooks, *make_hooks(config), *built_in, Watchdog(), Profile())
    with contextlib.ExitStack() as ends:
        for hook in run.hooks:
            hook.on_start(run)
            ends.push(functools.partial(_end, hook, run))
        _run_steps(run, evaluation, compiles)
    best_step = checkpoints.best_step()
    return Trained(run.state, run.scores, best_step, checkpoints.scores(best_step))


def _end(hook: Hook, run: TrainingRun, kind: object, error: BaseException | None, traceback: object) -> None:
    """Calls `on_end`, as a function for `ExitStack.push`."""
    del kind, traceback
    hook.on_end(run, error)


def _run_steps(run: TrainingRun, evaluation: Evaluation, compiles: bool) -> None:
    """Runs the steps after `run.start_step`, and calls the hooks. `compiles`: the program is not compiled yet."""
    run_step = _StepRunner(run, compiles)
    read_ahead = contextlib.closing(on_devices(run.task.batches(run.start_step), run.mesh))
    with signals.stop_signals() as run.stops_now, read_ahead as batches:
        run.print("reading the first batch")
        is_saved = run.checkpoints.latest_step() is not None
        run.clocks.start_steps(resumes=is_saved)
        if is_saved:
            evaluation.catch_up(run)
        if has_stopped(run.scores, run.config.eval.patience):
            return
        for step in range(run.start_step + 1, run.total_steps + 1):
            run.step = step
            for hook in run.hooks:
                hook.before_step(run)
            with run.clocks.waiting("data"):
                batch = next(batches)
            for hook in run.hooks:
                hook.on_batch(run, batch)

            metrics = run_step(batch)
            signals.saves_first(f"saving step {step} first")
            run_step.wait()
            run.is_stopping = run.stops_now()
            if not run.is_stopping:
                signals.saves_first(f"saving step {step + 1} first")

            for hook in run.hooks:
                hook.on_step(run, metrics)
            if run.is_stopping:
                raise KeyboardInterrupt(f"stopped at step {step}; the same command continues from there")
            if run.is_last_step:
                return
            run.finish_step()


class _StepRunner:
    """Runs the steps of a run on the devices, while the host goes up to `STEPS_IN_FLIGHT` steps ahead."""

    def __init__(self, run: TrainingRun, compiles: bool):
        self._run, self._compiles = run, compiles
        self._hyperparameters = put_hyperparameters(run.config.seed, run.schedule, run.mesh)
        self._compiled: set[tuple] = set()  # compiled functions, each with the shapes of a batch
        # The losses of steps that the devices may still run.
        self._losses: collections.deque[jax.Array] = collections.deque()

    def __call__(self, batch: dict) -> dict:
        """Starts step `run.step`, sets `run.state` to its result, and returns its metrics."""
        run, is_first_step = self._run, self._run.step == self._run.start_step + 1
        stage_task, run.step_config = run.task.loss_and_config(run.step - 1)
        train_step = run.program.step_of(stage_task, run.step_config)
        shapes = (train_step, *(x.shape for x in jax.tree.leaves(batch)))
        is_compiled = shapes in self._compiled
        if self._compiles and not is_compiled:
            run.print("compiling the training step (usually 10-60 s)")
            if not is_first_step:
                signals.saves_first(f"saving step {run.step} after its compilation")
        with (
            jax.transfer_guard("disallow"),  # No implicit transfers to or from the host.
            contextlib.nullcontext() if is_compiled else run.clocks.waiting("compile"),
        ):
            run.state, metrics = train_step(run.state, batch, self._hyperparameters)
        self._compiled.add(shapes)
        self._losses.append(metrics["loss"])
        return metrics

    def wait(self) -> None:
        """Waits until at most `STEPS_IN_FLIGHT` steps are left; after the first step, whose end is printed, none."""
        in_flight = STEPS_IN_FLIGHT if self._run.step > self._run.start_step + 1 else 0
        if len(self._losses) > in_flight:
            with self._run.clocks.waiting("devices"):
                self._losses.popleft().block_until_ready()


def _restore_or_initialize(
    task: Task,
    config: ConfigDict,
    workdir: epath.PathLike,
    program: Program,
    checkpoints: Checkpoints,
    initialize: Callable[[dict], dict] | None,
    parent: Parent | None,
) -> tuple[int, TrainState]:
    """Returns the start step and the state, which is restored, read from the parent, or initialized."""
    start, is_first = checkpoints.latest_step(), jax.process_index() == 0
    if start is not None:
        check_resumable(workdir, start, task.total_steps)
        if is_resumable(workdir, start):
            if is_first:
                phase(f"restoring step {start}")
            return start, checkpoints.restore(start, program.state)
    elif parent is not None:
        return parent.step, restore_from(parent.workdir, parent.step, program.state)
    if is_first:
        count = sum(x.size for x in jax.tree.leaves(program.state.params))
        phase(f"initializing {count:,} parameters")
    state = program.init(jax.random.key(config.seed))
    if start is None:
        return 0, state if initialize is None else state.with_initial_params(initialize(state.params))
    # The last checkpoint of a trial has params only.
    saved = checkpoints.restore(start, program.state, params_only=True)
    return start, TrainState(state.step + start, saved.params, state.opt_state, saved.average, state.carry)
