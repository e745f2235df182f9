"""The training loop, shared by all tasks."""

import contextlib
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from bertjax.common.files import write_whole
from bertjax.common.progress import Pace, phase
from bertjax.distributed.topology import peak_flops
from bertjax.distributed.transfers import STEPS_IN_FLIGHT, on_devices
from bertjax.training.checkpoints.checkpoint import (
    Checkpoints,
    Parent,
    check_resumable,
    has_stopped,
    is_resumable,
    restore_from,
)
from bertjax.training.monitoring.clocks import Clocks, Watchdog, describe_wall
from bertjax.training.monitoring.divergence import Diverged, NonFinite
from bertjax.training.monitoring.logging import MetricsWriter, Progress
from bertjax.training.monitoring.memory import require_room
from bertjax.training.monitoring.profile import profiled
from bertjax.training.optim.schedules import schedule_of
from bertjax.training.recurrence import warmed_up
from bertjax.training.scores import Scores
from bertjax.training.signals import saves_first, stop_signals
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
    config,
    workdir: epath.PathLike,
    mesh: Mesh,
    initialize: Callable[[dict], dict] | None = None,
    program: Program | None = None,
    parent: Parent | None = None,
    *,
    on_start: Callable[[int], None] = lambda step: None,
    resumable_at_end: bool = True,
    began: float | None = None,
) -> Trained:
    """Trains to `task.total_steps`, from the latest checkpoint in `workdir` if there is one; ends before that when
    `config.eval.patience` evaluations in a row were no better than those before them.

    Args:
      initialize: (random params) -> initial params of a new run.
      program: a program to reuse instead of compiling.
      parent: where a new run branches off.
      on_start: called with the start step once the state is restored or initialized, before training.
      resumable_at_end: saves the optimizer state with the last checkpoint too, so that training can be extended.
      began: when the run began in this process, by `time.monotonic`; None: now.

    On Ctrl-C or SIGTERM, saves a checkpoint and raises `KeyboardInterrupt`. Raises `Diverged` if the loss or the
    gradient norm is not finite, more often in a row than `config.optimizer.skip_nonfinite`.
    """
    clocks, watchdog = Clocks(began), Watchdog(config.watchdog)

    # State: restored, imported or random.
    compiles = program is None
    program = program or make_program(task, config, mesh)
    require_room(config, program)
    schedule = schedule_of(config, task.total_steps)
    hyperparameters = put_hyperparameters(config.seed, schedule, mesh)
    checkpoints = Checkpoints(workdir, config.checkpoint.keep, config.checkpoint.keep_every)
    start, state = _restore_or_initialize(task, config, workdir, program, checkpoints, initialize, parent)
    on_start(start)

    # Logging, on the first host only.
    workdir, is_first = epath.Path(workdir), jax.process_index() == 0
    host = f"host {jax.process_index()}" if jax.process_count() > 1 else ""
    writer = MetricsWriter(workdir, start, config) if is_first else None
    is_new = start == 0 and not config.get("budget")
    progress = Progress(task.total_steps, start, task.flops, names_budget=is_new) if is_first else None
    peak = peak_flops(mesh.devices.flat[0])
    scores = checkpoints.scores(start)
    sequences = 0  # since the last report
    unreported = writer.unreported(start) if is_first else []  # metrics since the last report, of an earlier process
    pending: list[dict] = []  # those of this process, still on the devices
    say = progress.say if is_first else lambda text: None
    if program.saves:
        say(program.saves)
    if task.recurrence and state.memory is None:
        state = warmed_up(task, program, state, mesh, start, say)
    nonfinite = NonFinite(task, config.optimizer.skip_nonfinite, schedule, workdir, say)

    def fetch(step: int) -> list[dict]:
        """Fetches the metrics of the pending steps, of which `step` is the last."""
        with clocks.waiting("devices"):
            fetched = jax.device_get(pending)
        pending.clear()
        nonfinite.check(step - len(fetched), fetched, has_checkpoint=checkpoints.latest_step() is not None)
        return fetched

    def report(step: int) -> None:
        """Logs the means of the metrics of the steps since the last report."""
        nonlocal sequences
        fetched, seconds = fetch(step), clocks.lap()
        found = nonfinite.finite([*unreported, *fetched])
        unreported.clear()
        means = {f"train/{name}": float(np.mean([m[name] for m in found])) for name in found[0]}
        tokens, padding = means.pop("train/tokens"), means.pop("train/padding")
        training = seconds["steps"] + seconds["data"]
        rate = task.flops(step - len(fetched), step) / training
        means["train/learning_rate"] = float(schedule(step - 1))
        means["train/sequences_per_second"] = sequences / training
        sequences = 0
        means["train/tokens_per_second"] = tokens * len(fetched) / training
        means["train/tokens_per_step"] = tokens
        means["train/real_tokens_share"] = tokens / (tokens + padding)
        if peak:
            means["train/mfu"] = rate / (peak * mesh.size)
        if is_first:
            writer.write_wall(step, seconds, means)
            progress.report(step, clocks.training(), means, task.flops(step, task.total_steps) / rate)

    def will_save(step: int) -> None:
        if not host:  # several hosts agree on a step after the signal
            saves_first(f"saving step {step} first")

    def evaluates_at(step: int) -> bool:
        return step == task.total_steps or (step > 0 and step % config.eval.every_steps == 0)

    def evaluations(start: int, stop: int) -> int:
        every = config.eval.every_steps
        return stop // every - start // every + (stop == task.total_steps and stop % every > 0)

    def evaluate(step: int) -> None:
        """Evaluates a step after its save has started. A signal aborts the evaluation; the resumed run repeats it."""
        nonlocal scores

        pace, batches = Pace(), itertools.count(1)

        def after_batch():
            if stops_now():
                raise KeyboardInterrupt(f"stopped at step {step}, during evaluation")
            number = next(batches)
            if pace.is_due():
                pace.printed()
                say(f"evaluating step {step}: {number:,} batches done")

        if "evaluation" not in compiled:
            say(f"evaluating step {step} (compiles first)")
            compiled.add("evaluation")
        with clocks.waiting("evaluation"):
            found = task.evaluate(program.gather(state.eval_params), step, after_batch)
            if found is not None and is_first:
                for name, content in task.files().items() if checkpoints.would_be_best(step, found) else ():
                    write_whole(workdir / name, content)
                numbers = {**found.scores, **found.decided}
                writer.write(step, {f"eval/{name}": value for name, value in numbers.items()})
                progress.say(f"step {step} eval: " + ", ".join(f"{k} {v:.4f}" for k, v in numbers.items()))
        if found is not None:
            with clocks.waiting("checkpoints"):
                scores = checkpoints.add_scores(step, found, evaluations)

    # Training.
    compiled: set = set()  # the steps and the shapes of batches that they are compiled for, and the evaluation
    # Whether all steps are done; whether all hosts stop here, so that they can wait for each other.
    has_finished, ends_together, done = False, False, start
    try:
        with (
            stop_signals() as stops_now,
            contextlib.closing(on_devices(task.batches(start), mesh)) as batches,
            profiled(
                range(start + 1, task.total_steps + 1),
                config.profile,
                workdir,
                finish=lambda: jax.block_until_ready(state),
                say=say,
            ) as steps,
        ):
            say("reading the first batch")
            is_saved = checkpoints.latest_step() is not None
            clocks.start_steps(resumes=is_saved)
            if is_saved and evaluates_at(start) and scores is None:  # stopped before the evaluation finished
                evaluate(start)
            for step in () if has_stopped(scores, config.eval.patience) else steps:
                with clocks.waiting("data"):
                    batch = next(batches)
                if is_first and step == start + 1:
                    progress.start(clocks.training())
                at = task.at(step - 1)
                train_step, sequences = program.step_of(*at), sequences + at[1].batch_size
                shapes = (train_step, *(x.shape for x in jax.tree.leaves(batch)))
                if compiles and shapes not in compiled:
                    say("compiling the training step (usually 10-60 s)")
                    if step > start + 1 and not host:
                        saves_first(f"saving step {step} after its compilation")
                with (
                    jax.transfer_guard("disallow"),  # no implicit transfers to or from the host
                    clocks.waiting("compile") if shapes not in compiled else contextlib.nullcontext(),
                ):
                    state, metrics = train_step(state, batch, hyperparameters)
                compiled.add(shapes)
                will_save(step)
                pending.append(metrics)
                in_flight = STEPS_IN_FLIGHT if step > start + 1 else 0  # the end of the first step is printed
                if len(pending) > in_flight:
                    with clocks.waiting("devices"):
                        pending[-1 - in_flight]["loss"].block_until_ready()

                stops, evaluates = stops_now(), evaluates_at(step)
                if not stops:
                    will_save(step + 1)
                saves = evaluates or step % config.checkpoint.every_steps == 0
                # Before saving: raises if the loss is not finite.
                if saves or step % config.log_every_steps == 0:
                    report(step)
                elif stops:
                    unreported += fetch(step)
                    if is_first:
                        writer.keep_unreported(step, unreported, clocks.lap())
                if is_first:
                    progress.advance(step - min(len(pending), in_flight), clocks.training())
                if saves or stops:
                    params_only = step == task.total_steps and not resumable_at_end
                    with clocks.waiting("checkpoints"):
                        checkpoints.save(step, state, params_only)
                    if is_first:
                        writer.flush()
                if stops:
                    raise KeyboardInterrupt(f"stopped at step {step}; the same command continues from there")
                if evaluates:
                    if not host:
                        saves_first(f"step {step} is saved, and evaluated when the run is resumed")
                    evaluate(step)
                    will_save(step + 1)
                if slow := watchdog.check(step, clocks.step(), host):
                    say(slow) if is_first else print(slow, flush=True)
                done = step
                if evaluates and has_stopped(scores, config.eval.patience):
                    break
        has_finished = ends_together = True
    except (KeyboardInterrupt, Diverged):  # on all hosts
        ends_together = True
        raise
    finally:
        with clocks.waiting("checkpoints"):
            checkpoints.close(deletes=ends_together)
        saves_first("")
        if is_first:
            progress.close()
            if has_finished:
                writer.write_end(done, clocks.lap())
            writer.close()
    if is_first:
        print(describe_wall(writer.wall), flush=True)
    best_step = checkpoints.best_step()
    return Trained(state, scores, best_step, checkpoints.scores(best_step))


def _restore_or_initialize(
    task: Task, config, workdir, program: Program, checkpoints: Checkpoints, initialize, parent: Parent | None
):
    """Returns the start step and the state: restored, from the parent, or initialized."""
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
    # The end of a trial, whose last checkpoint has params only.
    return start, checkpoints.restore(start, program.state, params_only=True).replace(
        step=state.step + start, opt_state=state.opt_state, memory=state.memory
    )
