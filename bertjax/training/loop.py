"""The training loop, shared by all tasks."""

import collections
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from etils import epath
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.common.progress import phase
from bertjax.distributed.transfers import STEPS_IN_FLIGHT, copy_to_devices
from bertjax.training import signals
from bertjax.training.checkpoints import checkpoint
from bertjax.training.hooks.checkpoints import SaveCheckpoints
from bertjax.training.hooks.divergence import CheckDivergence
from bertjax.training.hooks.evaluation import Evaluation
from bertjax.training.hooks.hook import Hook, TrainingRun
from bertjax.training.hooks.metrics import ReportMetrics
from bertjax.training.hooks.profile import Profile
from bertjax.training.hooks.recurrent_memory import FillRecurrentMemory
from bertjax.training.hooks.registry import make_hooks
from bertjax.training.hooks.watchdog import Watchdog
from bertjax.training.monitoring.clocks import Clocks
from bertjax.training.monitoring.memory import check_memory_bound
from bertjax.training.optim.schedules import schedule_of
from bertjax.training.scores import Scores
from bertjax.training.state import TrainState
from bertjax.training.step import Program, put_hyperparameters
from bertjax.training.task import Task


class TrainingResult(NamedTuple):
    """The result of training.

    Attributes:
      state: the state after the last step.
      scores: the scores of the last step; None without held-out data.
      best_step: the step of the best checkpoint; None if no checkpoint has a score.
      best_scores: the scores of the best checkpoint; None if no checkpoint has a score.
    """

    state: TrainState
    scores: Scores | None
    best_step: int | None
    best_scores: Scores | None


def train_task(
    task: Task,
    config: ConfigDict,
    workdir: epath.PathLike,
    mesh: Mesh,
    initialize: Callable[[dict], dict] | None = None,
    program: Program | None = None,
    parent: checkpoint.Parent | None = None,
    *,
    hooks: Sequence[Hook] = (),
    save_final_opt_state: bool = True,
    start_time: float | None = None,
) -> TrainingResult:
    """Trains up to step `task.total_steps`, from the latest checkpoint in `workdir` if there is one.

    Training ends early after `config.eval.patience` evaluations in a row without a better score, or if a hook calls
    `run.end`. After Ctrl-C or SIGTERM, training saves a checkpoint and stops.

    Args:
      task: the task.
      config: the config of the run.
      workdir: the folder of the run.
      mesh: the devices.
      initialize: (random params) -> initial params, for a workdir without a checkpoint; None keeps the random params.
      program: the compiled functions of an earlier call; None compiles them again.
      parent: a checkpoint of another run, which provides the initial state for a workdir without a checkpoint.
      hooks: hooks that are called before the hooks of the config.
      save_final_opt_state: whether the last checkpoint has the optimizer state, so that a later command with more
        steps can resume from it.
      start_time: the time at which the command started, in seconds of `time.monotonic`; None: the time of this call.

    Returns:
      The state of the last step, and the scores of the last step and of the best checkpoint.

    Raises:
      KeyboardInterrupt: after a signal.
      DivergenceError: the loss or the gradient norm is not finite in more than `config.optimizer.skip_nonfinite`
        steps in a row.
    """
    clocks, needs_compilation = Clocks(start_time), program is None
    program = program or Program(task, config, mesh)
    check_memory_bound(config, program)
    checkpoints = checkpoint.Checkpoints(workdir, config.checkpoint.keep, config.checkpoint.keep_every)
    start_step, state = _restore_or_initialize(task, config, workdir, program, checkpoints, initialize, parent)
    run = TrainingRun(
        config,
        epath.Path(workdir),
        mesh,
        task,
        state,
        start_step,
        is_first_host=jax.process_index() == 0,
        program=program,
        schedule=schedule_of(config, task.total_steps),
        checkpoints=checkpoints,
        clocks=clocks,
        scores=checkpoints.scores(start_step),
    )
    del state  # The first step reuses the memory of the arrays, so that nothing may read them afterwards.
    evaluation = Evaluation()
    first_hooks = FillRecurrentMemory(), CheckDivergence(), ReportMetrics(), SaveCheckpoints(save_final_opt_state)
    run.hooks = (*hooks, *make_hooks(config), *first_hooks, evaluation, Watchdog(), Profile())
    with contextlib.ExitStack() as on_end_calls:
        for hook in run.hooks:
            hook.on_start(run)
            on_end_calls.push(functools.partial(_call_on_end, hook, run))
        _run_steps(run, evaluation, needs_compilation)
    best_step = checkpoints.best_step()
    return TrainingResult(run.state, run.scores, best_step, checkpoints.scores(best_step))


def _call_on_end(hook: Hook, run: TrainingRun, kind: Any, error: BaseException | None, traceback: Any) -> None:
    """Calls `on_end`. Returns None, because a true value would suppress the error."""
    del kind, traceback
    hook.on_end(run, error)


def _run_steps(run: TrainingRun, evaluation: Evaluation, needs_compilation: bool) -> None:
    """Runs the steps after `run.start_step`, and calls the hooks.

    Args:
      run: the run.
      evaluation: the hook that evaluates the model.
      needs_compilation: whether the training step must be compiled. The loop then prints a line before compilation.
    """
    run_step = _StepRunner(run, needs_compilation)
    prefetch = contextlib.closing(copy_to_devices(run.task.batches(run.start_step), run.mesh))
    with signals.stop_on_signal() as run.should_stop, prefetch as batches:
        run.print("reading the first batch")
        is_resumed = run.checkpoints.latest_step() is not None
        run.clocks.end_startup(is_resumed)
        if is_resumed:
            evaluation.evaluate_if_missed(run)
        if checkpoint.has_stopped_early(run.scores, run.config.eval.patience):
            return
        for step in range(run.start_step + 1, run.total_steps + 1):
            run.step = step
            for hook in run.hooks:
                hook.before_step(run)
            with run.clocks.measure("data"):
                batch = next(batches)
            for hook in run.hooks:
                hook.on_batch(run, batch)

            metrics = run_step(batch)
            signals.set_unsaved_work(f"saving step {step} first")
            run_step.wait()
            run.is_stopping = run.should_stop()
            if not run.is_stopping:
                signals.set_unsaved_work(f"saving step {step + 1} first")

            for hook in run.hooks:
                hook.on_step(run, metrics)
            if run.is_stopping:
                raise KeyboardInterrupt(f"stopped at step {step}; the same command continues from there")
            if run.is_last_step:
                return
            run.finish_step()


class _StepRunner:
    """Dispatches training steps to the devices. At most `STEPS_IN_FLIGHT` dispatched steps are unfinished."""

    def __init__(self, run: TrainingRun, needs_compilation: bool):
        self._run, self._needs_compilation = run, needs_compilation
        self._hyperparameters = put_hyperparameters(run.config.seed, run.schedule, run.mesh)
        self._compiled: set[tuple] = set()  # (compiled function, shapes of the arrays of a batch)
        # The losses of dispatched steps that may be unfinished, oldest first.
        self._losses: collections.deque[jax.Array] = collections.deque()

    def __call__(self, batch: dict) -> dict:
        """Dispatches step `run.step`, sets `run.state` to the new state, and returns the metrics as device arrays."""
        run, is_first_step = self._run, self._run.step == self._run.start_step + 1
        stage_task, run.step_config = run.task.loss_and_config(run.step - 1)
        train_step = run.program.step_of(stage_task, run.step_config)
        shapes = (train_step, *(x.shape for x in jax.tree.leaves(batch)))
        is_compiled = shapes in self._compiled
        if self._needs_compilation and not is_compiled:
            run.print("compiling the training step (usually 10-60 s)")
            if not is_first_step:
                signals.set_unsaved_work(f"saving step {run.step} after its compilation")
        with (
            jax.transfer_guard("disallow"),  # No implicit transfers to or from the host.
            contextlib.nullcontext() if is_compiled else run.clocks.measure("compile"),
        ):
            run.state, metrics = train_step(run.state, batch, self._hyperparameters)
        self._compiled.add(shapes)
        self._losses.append(metrics["loss"])
        return metrics

    def wait(self) -> None:
        """Waits until at most `STEPS_IN_FLIGHT` dispatched steps are unfinished.

        Waits for the first step of the process, because the hook `ReportMetrics` prints a line about this step.
        """
        in_flight = STEPS_IN_FLIGHT if self._run.step > self._run.start_step + 1 else 0
        if len(self._losses) > in_flight:
            with self._run.clocks.measure("devices"):
                self._losses.popleft().block_until_ready()


def _restore_or_initialize(
    task: Task,
    config: ConfigDict,
    workdir: epath.PathLike,
    program: Program,
    checkpoints: checkpoint.Checkpoints,
    initialize: Callable[[dict], dict] | None,
    parent: checkpoint.Parent | None,
) -> tuple[int, TrainState]:
    """Returns the start step and the state.

    The state is restored from the latest checkpoint in the workdir, else from the parent, else initialized.
    """
    start_step, is_first_host = checkpoints.latest_step(), jax.process_index() == 0
    if start_step is not None:
        checkpoint.check_resumable(workdir, start_step, task.total_steps)
        if checkpoint.is_resumable(workdir, start_step):
            if is_first_host:
                phase(f"restoring the checkpoint of step {start_step}")
            return start_step, checkpoints.restore(start_step, program.state)
    elif parent is not None:
        return parent.step, checkpoint.restore_from(parent.workdir, parent.step, program.state)
    if is_first_host:
        count = sum(x.size for x in jax.tree.leaves(program.state.params))
        phase(f"initializing {count:,} parameters")
    state = program.init(jax.random.key(config.seed))
    if start_step is None:
        return 0, state if initialize is None else state.with_initial_params(initialize(state.params))
    # The last checkpoint of a run without `save_final_opt_state` has no optimizer state. The run is finished, so
    # the new optimizer state is never used.
    saved = checkpoints.restore(start_step, program.state, params_only=True)
    return start_step, TrainState(state.step + start_step, saved.params, state.opt_state, saved.average, state.carry)
