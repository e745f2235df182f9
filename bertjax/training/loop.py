"""The one training loop. It knows batches, losses and scores, and no task by name."""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from jax.sharding import Mesh

from bertjax.config import UserError
from bertjax.model.dropout import row_keys
from bertjax.sharding.mesh import batch_sharding, put_batch, replicated
from bertjax.sharding.rules import RULES_WITHIN_DATA
from bertjax.sharding.topology import peak_flops
from bertjax.training.checkpoint import Checkpoints
from bertjax.training.logging import MetricsWriter, Progress
from bertjax.training.optimizer import Schedule, make_optimizer, make_schedule
from bertjax.training.state import Layout, TrainState, abstract_state, learnt, make_init, make_layout
from bertjax.training.stop import stop_signals

Batch = dict[str, np.ndarray]
STEPS_IN_FLIGHT = 2  # that the host may run ahead of the devices


class Diverged(UserError):
    """The loss of a step is no number."""


class Task(Protocol):
    """What is learnt."""

    total_steps: int
    frozen: tuple[str, ...]  # parts of the params, by their name at the top, that stay as they are

    def init_params(self, key: jax.Array) -> dict:
        """Random params, logically partitioned."""

    def batches(self, start_step: int) -> Iterator[Batch]:
        """This host's rows of the batches of `start_step`, `start_step + 1`, ..."""

    def normalize(self, batch: dict) -> dict:
        """Scales a whole batch's weights so that the losses of its microbatches add up to the loss of the batch."""

    def cast(self, params: dict) -> dict:
        """Params in the types that `loss` and `evaluate` compute with: what travels between devices."""

    def loss(self, params: dict, batch: dict, dropout_keys: jax.Array | None) -> tuple[jax.Array, dict]:
        """Loss, and metrics that add up likewise; among them `tokens`, the number of real ones.

        `params` are cast. `dropout_keys` are random keys, one for each row of the batch; None: no dropout.
        """

    def evaluate(self, params: dict, step: int) -> dict[str, float]:
        """Scores on held-out data after `step` updates; empty where there is none. `params` are cast."""

    def score(self, metrics: dict[str, float]) -> float:
        """Of an evaluation, for keeping the best checkpoint: higher is better."""

    def flops(self, start: int, stop: int) -> int:
        """Model FLOPs of the steps from `start` to before `stop`."""


class Recipe(NamedTuple):
    """What a run has of its own and its compiled step gets as data; runs that differ in no more share the step."""

    seed: int
    schedule: Schedule


class Program(NamedTuple):
    """A task's compiled functions. It holds for every task of the same model, loss and batch shapes."""

    layout: Layout
    init: Callable  # key -> the state of step 0
    state: TrainState  # the shapes, types and shardings of a state
    train_step: Callable  # (state, batch, recipe) -> (state, metrics); takes the state's memory over
    gather: Callable  # params at rest -> params as `task.evaluate` takes them


def make_program(task: Task, config, mesh: Mesh) -> Program:
    optimizer = make_optimizer(config.optimizer)
    layout = make_layout(task.init_params, optimizer, mesh, task.frozen)
    init = make_init(task.init_params, optimizer, layout, task.frozen)
    return Program(
        layout,
        init,
        abstract_state(init, layout),
        _make_train_step(task, optimizer, layout, mesh, config.microbatches, config.grad_dtype),
        jax.jit(task.cast, in_shardings=(layout.state.params,), out_shardings=layout.compute),
    )


def put_recipe(seed: int, schedule: Schedule, mesh: Mesh) -> Recipe:
    """A recipe on the devices."""
    numbers = Schedule(np.float32(schedule.peak), np.int32(schedule.warmup_steps), np.int32(schedule.total_steps))
    return jax.device_put(Recipe(np.int32(seed), numbers), replicated(mesh))


def _make_train_step(task: Task, optimizer, layout: Layout, mesh: Mesh, microbatches: int, grad_dtype: str):
    """The update of one step.

    The dropout of a row depends on (seed, step, row of the batch) only. Each group of devices along `data` sums up the
    gradients of its own rows; then, once a step and in `grad_dtype`, these sums cross the network.
    """
    ways, frozen = mesh.shape["data"], task.frozen

    def gradients(params, batch, keys):
        def loss_of(part):
            return task.loss({**params, **part}, batch, keys)

        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(learnt(params, frozen))
        return grads, {"loss": loss, **metrics}

    def accumulated_gradients(params, batch, keys):
        # Every microbatch takes its rows from all devices, so that none has to move: [rows] -> [pieces, rows / pieces].
        pieces = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, microbatches, *x.shape[1:]), 1, 0), (batch, keys))

        def add(total, piece):
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, gradients(params, *piece)), None

        shapes = jax.eval_shape(gradients, params, *jax.tree.map(lambda x: x[0], pieces))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        return jax.lax.scan(add, zeros, pieces)[0]

    def sum_over_data(grads, sharding):
        """`[ways, ...]` -> `[...]`, of which each device gets what it keeps of the param."""
        # Not jnp.sum, which would add bfloat16 up, and send it, as float32.
        total = jax.lax.reduce(grads.astype(grad_dtype), jnp.zeros([], grad_dtype), jax.lax.add, (0,))
        return jax.lax.with_sharding_constraint(total, sharding).astype(jnp.float32)

    def train_step(state: TrainState, batch: dict, recipe: Recipe) -> tuple[TrainState, dict]:
        params = jax.lax.with_sharding_constraint(task.cast(state.params), layout.compute)
        batch = task.normalize(batch)
        rows = jnp.arange(len(jax.tree.leaves(batch)[0]))
        key = jax.random.fold_in(jax.random.key(recipe.seed, impl="threefry2x32"), state.step)
        keys = row_keys(key, rows)

        groups = jax.tree.map(lambda x: x.reshape(ways, -1, *x.shape[1:]), (batch, keys))
        compute = gradients if microbatches == 1 else accumulated_gradients
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(RULES_WITHIN_DATA):
            grads, metrics = jax.vmap(compute, (None, 0, 0), spmd_axis_name="data")(params, *groups)
        grads = jax.tree.map(sum_over_data, grads, learnt(layout.state.params, frozen))
        metrics = jax.tree.map(lambda x: x.sum(0), metrics)

        rate = recipe.schedule(state.step)
        before = learnt(state.params, frozen)
        updates, opt_state = optimizer.update(grads, state.opt_state, before, learning_rate=rate)
        params = {**state.params, **optax.apply_updates(before, updates)}
        return TrainState(state.step + 1, params, opt_state), {**metrics, "grad_norm": optax.global_norm(grads)}

    return jax.jit(
        train_step,
        in_shardings=(layout.state, batch_sharding(mesh), replicated(mesh)),
        out_shardings=(layout.state, replicated(mesh)),
        donate_argnums=0,
    )


def train(
    task: Task,
    config,
    workdir: epath.PathLike,
    mesh: Mesh,
    initialize: Callable[[dict], dict] | None = None,
    program: Program | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """Trains to `task.total_steps`, from the latest checkpoint in `workdir` if there is one.

    Otherwise from random params, or what `initialize` makes of them: it may put others in their places. `program`: that
    of a run before this one, where it would be the same.

    Returns the state and the scores at the end. Ctrl-C and SIGTERM save a checkpoint and raise `KeyboardInterrupt`.
    Raises `Diverged` where the loss, or the norm of its gradients, is no number.
    """
    # State: restored, imported or random.
    program = program or make_program(task, config, mesh)
    schedule = make_schedule(config.optimizer, task.total_steps)
    recipe = put_recipe(config.seed, schedule, mesh)
    checkpoints = Checkpoints(workdir, config.checkpoint.keep)
    start = checkpoints.latest_step()
    if start is not None:
        if start > task.total_steps:
            raise UserError(
                f"{workdir} is at step {start}, past the config's {task.total_steps}; take another --workdir"
            )
        state = checkpoints.restore(start, program.state)
    else:
        start = 0
        state = program.init(jax.random.key(config.seed))
        if initialize is not None:
            state = state.replace(params=initialize(state.params))

    # Where numbers go: from the first host only.
    is_first = jax.process_index() == 0
    writer = MetricsWriter(workdir, start) if is_first else None
    progress = Progress(task.total_steps, start) if is_first else None
    peak = peak_flops(mesh.devices.flat[0])
    scores: dict[str, float] = {}
    pending: list[dict] = []  # metrics of the steps since the last report, still on the devices
    clock = time.monotonic()

    def report(step: int) -> None:
        """Fetches the metrics of the steps since the last report, and says their means."""
        nonlocal clock
        fetched = jax.device_get(pending)
        seconds, first = time.monotonic() - clock, step - len(pending)
        pending.clear()
        means = {f"train/{name}": float(np.mean([m[name] for m in fetched])) for name in fetched[0]}
        tokens = means.pop("train/tokens")
        for offset, metrics in enumerate(fetched):
            # Either makes params of which nothing comes any more.
            if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
                raise Diverged(_diverged(first + offset, metrics, float(schedule(first + offset)), workdir))
        rate = task.flops(first, step) / seconds
        means["train/learning_rate"] = float(schedule(step - 1))
        means["train/sequences_per_second"] = config.batch_size * len(fetched) / seconds
        means["train/tokens_per_second"] = tokens * len(fetched) / seconds
        if peak:
            means["train/mfu"] = rate / (peak * mesh.size)
        if is_first:
            writer.write(step, means)
            progress.report(step, means, task.flops(step, task.total_steps) / rate)
        clock = time.monotonic()

    def evaluate(step: int) -> None:
        nonlocal clock, scores
        began = time.monotonic()
        scores = task.evaluate(program.gather(state.params), step)
        if scores and is_first:
            writer.write(step, {f"eval/{name}": value for name, value in scores.items()})
            text = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
            progress.say(f"step {step} held out: {text}")
        clock += time.monotonic() - began

    # Training.
    try:
        with (
            stop_signals() as stops_now,
            contextlib.closing(_on_devices(task.batches(start), mesh, config.batch_size)) as batches,
        ):
            for step in range(start + 1, task.total_steps + 1):
                batch = next(batches)
                with jax.transfer_guard("disallow"):  # nothing may go to or from the host unasked
                    state, metrics = program.train_step(state, batch, recipe)
                pending.append(metrics)
                if len(pending) > STEPS_IN_FLIGHT:
                    pending[-1 - STEPS_IN_FLIGHT]["loss"].block_until_ready()
                if is_first:
                    progress.advance()

                stops, last = stops_now(), step == task.total_steps  # a signal from here on is the next step's
                evaluates = last or step % config.eval.every_steps == 0
                saves = evaluates or stops or step % config.checkpoint.every_steps == 0
                if saves or step % config.log_every_steps == 0:
                    report(step)  # before a checkpoint: nothing that is not a number is ever saved
                if evaluates:
                    evaluate(step)
                if saves:
                    checkpoints.save(step, state, task.score(scores) if evaluates and scores else None)
                    if is_first:
                        writer.flush()
                if stops:
                    raise KeyboardInterrupt(f"stopped at step {step}")
            if start == task.total_steps:
                evaluate(start)
    finally:
        checkpoints.close()
        if is_first:
            progress.close()
            writer.close()
    return state, scores


def _on_devices(batches: Iterator[Batch], mesh: Mesh, batch_size: int) -> Iterator[dict]:
    """Copies batches to the devices one ahead of the step that needs them."""
    ahead = collections.deque()
    with contextlib.closing(batches):
        for batch in batches:
            ahead.append(put_batch(batch, mesh, batch_size))
            if len(ahead) > 1:
                yield ahead.popleft()
        yield from ahead


def _diverged(step: int, metrics: dict, learning_rate: float, workdir) -> str:
    return (
        f"training diverged: the loss of step {step + 1} is {metrics['loss']} (gradient norm "
        f"{metrics['grad_norm']:.3g}, learning rate {learning_rate:.3g}); lower config.optimizer.learning_rate or warm "
        f"up for longer. The checkpoints in {workdir} are from before"
    )
