"""The compiled training step, the same for all tasks."""

import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bertjax.distributed.mesh import GROUPS, batch_sharding, compiler_options, replicated
from bertjax.distributed.rules import RULES_WITHIN_DATA
from bertjax.nn.ops.dropout import row_keys
from bertjax.training.optim.frozen import find_frozen, layer_factors
from bertjax.training.optim.optimizers import make_optimizer
from bertjax.training.optim.schedules import Schedule, schedule_of
from bertjax.training.state import (
    NONE_FROZEN,
    Frozen,
    Layout,
    TrainState,
    abstract_axes,
    abstract_state,
    abstract_trainable,
    make_init,
    make_layout,
    merge_trainable,
    trainable_leaves,
    trainable_params,
)
from bertjax.training.task import Task


class Hyperparameters(NamedTuple):
    """Inputs of the compiled step, so that runs that differ only in these share it."""

    seed: int
    schedule: Schedule


class Program(NamedTuple):
    """The compiled functions of a task; reusable for tasks with the same model, loss and batch shapes."""

    layout: Layout
    init: Callable  # key -> the state of step 0
    state: TrainState  # shapes, types and shardings
    train_step: Callable  # (state, batch, hyperparameters) -> (state, metrics); donates the state
    step_of: Callable  # what `Task.at` returns -> its `train_step`
    remember: Callable  # (task, state, batch) -> the state whose rows have also read the batch, without training
    gather: Callable  # stored params -> params for `task.evaluate`
    saves: str  # a line about what is frozen, and the memory that this saves; "" if nothing is


def make_program(task: Task, config, mesh: Mesh) -> Program:
    init_params = jax.jit(task.init_params)  # one trace serves all functions below
    axes = abstract_axes(init_params)
    frozen = find_frozen(task, config, axes)
    optimizer = _make_optimizer(task, config, axes, frozen)
    new_memory = task.recurrence.new_memory if task.recurrence else None
    has_average = config.optimizer.average > 0
    layout = make_layout(init_params, optimizer, mesh, frozen, has_average, new_memory)
    init = make_init(init_params, optimizer, layout, frozen, new_memory or (lambda: None))
    made = {_compiled_from(config): _make_train_step(task, optimizer, layout, frozen, mesh, config)}

    def step_of(of_stage: Task, its_config):
        key = _compiled_from(its_config)
        if key not in made:
            made[key] = _make_train_step(of_stage, optimizer, layout, frozen, mesh, its_config)
        return made[key]

    return Program(
        layout,
        init,
        abstract_state(init, layout),
        step_of(task, config),
        step_of,
        _make_remember(layout, mesh),
        jax.jit(task.cast, in_shardings=(layout.state.params,), out_shardings=layout.compute),
        _describe_frozen(task, config, axes, frozen) if frozen else "",
    )


def _make_optimizer(task: Task, config, axes: dict, frozen: Frozen) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer of what is trained."""
    own, decay, factors = trainable_leaves(axes, frozen), config.optimizer.layer_decay, None
    if decay != 1:
        factors = layer_factors(task, decay, axes, abstract_trainable(task.init_params, frozen), frozen)
    return make_optimizer(config.optimizer, own, factors)


def _describe_frozen(task: Task, config, axes: dict, frozen: Frozen) -> str:
    def measure(frozen: Frozen) -> tuple[int, int]:
        """Returns how many params are trained, and the bytes of the optimizer's state."""
        trained = abstract_trainable(task.init_params, frozen)
        state = jax.eval_shape(make_optimizer(config.optimizer, trainable_leaves(axes, frozen)).init, trained)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        return sum(x.size for x in jax.tree.leaves(trained)), size

    (some, small), (every, large) = measure(frozen), measure(NONE_FROZEN)
    return f"trains {some:,} of {every:,} params; the optimizer's state has {small:,} bytes, not {large:,}"


def _compiled_from(config) -> str:
    """What stages may change of the compiled step."""
    return json.dumps([config.model.to_dict(), config.microbatches, config.get("objective")])


def put_hyperparameters(seed: int, schedule: Schedule, mesh: Mesh) -> Hyperparameters:
    """Copies the hyperparameters to the devices."""
    return jax.device_put(_as_inputs(Hyperparameters(seed, schedule)), replicated(mesh))


def abstract_hyperparameters(config, mesh: Mesh) -> Hyperparameters:
    """Returns the shapes, types and shardings of `put_hyperparameters`."""
    numbers = _as_inputs(Hyperparameters(config.seed, schedule_of(config, total_steps=1)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=replicated(mesh)), numbers)


def _as_inputs(hyperparameters: Hyperparameters) -> Hyperparameters:
    def number(x):
        return np.int32(x) if np.issubdtype(np.asarray(x).dtype, np.integer) else np.float32(x)

    return jax.tree.map(number, hyperparameters)


def fits_in_memory(lowered, limit: int | None) -> bool:
    """Compiles a program, and returns whether it fits in so many bytes of a device; without a limit, in what the
    compiler knows of it."""
    try:
        sizes = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:  # a TPU's compiler
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    needed = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes  # the output replaces the donated arguments
    return limit is None or needed <= limit


def averaged(state: TrainState, params: dict, decay: float) -> dict:
    """Returns the moving average after a step. Early steps count more, so that the first params are soon forgotten, as
    in TensorFlow's ExponentialMovingAverage."""
    step = state.step.astype(jnp.float32)
    new = 1 - jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda old, x: old + new * (x - old), state.average, params)


def _make_train_step(task: Task, optimizer, layout: Layout, frozen: Frozen, mesh: Mesh, config):
    """Compiles the training step.

    The dropout of a row depends only on (seed, step, row of the batch); if a batch has `dropout_rows`, those are its
    rows' numbers, so that the number of packed rows does not change it. Each index along `data` sums the gradients of
    its own rows; these sums are then reduced across the network, once per step, in `config.grad_dtype`.

    With `config.optimizer.skip_nonfinite`, a step whose loss or gradient is not finite changes only the step's number.
    """
    microbatches, grad_dtype = config.microbatches, config.grad_dtype

    def gradients(params, batch, keys):
        def loss_of(part):
            return task.loss(merge_trainable(params, part, frozen), batch, keys)

        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable_params(params, frozen))
        memory = metrics.pop("memory", None)
        return (grads, {"loss": loss, **metrics}), memory

    def in_parts(arrays):
        # Each microbatch takes rows from all devices, so that none move: [rows] -> [microbatches, rows / microbatches].
        return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, microbatches, *x.shape[1:]), 1, 0), arrays)

    def whole(parts):
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]), parts)

    def summed(compute, parts):
        """Returns the sums, in float32, of what `compute` returns first of each microbatch; and what it returns then,
        arrays `[rows, ...]` or None, of all rows."""

        def add(total, part):
            found, of_rows = compute(*part)
            return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, found), of_rows

        shapes, _ = jax.eval_shape(compute, *jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
        total, of_rows = jax.lax.scan(add, zeros, parts)
        return total, whole(of_rows)

    def accumulated_gradients(params, batch, keys):
        return summed(lambda *part: gradients(params, *part), in_parts((batch, keys)))

    def cached_gradients(params, batch, keys):
        """Returns the same as `gradients` for rows that depend on each other (GradCache; Gao et al. 2021).

        Computes the outputs of all rows, then the gradient of the loss with respect to these outputs, and then the
        gradient of each microbatch.
        """
        parts = in_parts((batch, keys))
        outputs = jax.lax.map(lambda part: task.outputs(params, *part), parts)

        def loss_of(outputs):
            return task.loss_of_outputs(whole(outputs), batch)

        (loss, metrics), of_outputs = jax.value_and_grad(loss_of, has_aux=True)(outputs)

        def gradients_of(part, of_its_outputs):
            _, pull = jax.vjp(
                lambda own: task.outputs(merge_trainable(params, own, frozen), *part), trainable_params(params, frozen)
            )
            return pull(of_its_outputs)[0], None

        grads, _ = summed(gradients_of, (parts, of_outputs))
        return (grads, {"loss": loss, **metrics}), None

    def sum_over_data(grads, sharding):
        """Sums `[ways, ...]` to `[...]`, sharded like the stored param."""
        # Not jnp.sum: it would sum, and send, bfloat16 as float32.
        total = jax.lax.reduce(grads.astype(grad_dtype), jnp.zeros([], grad_dtype), jax.lax.add, (0,))
        return jax.lax.with_sharding_constraint(total, sharding).astype(jnp.float32)

    def train_step(state: TrainState, batch: dict, hyperparameters: Hyperparameters) -> tuple[TrainState, dict]:
        params = _gathered(task, state, layout, mesh)
        batch, rows = _inputs(task, state, batch)
        key = jax.random.fold_in(jax.random.key(hyperparameters.seed, impl="threefry2x32"), state.step)
        keys = row_keys(key, rows)

        in_microbatches = cached_gradients if task.couples_rows else accumulated_gradients
        compute = gradients if microbatches == 1 else in_microbatches
        (grads, metrics), memory = _in_groups(compute, mesh, params, batch, keys)
        grads = jax.tree.map(sum_over_data, grads, layout.trainable)
        metrics = jax.tree.map(lambda x: x.sum(0), metrics)

        rate = hyperparameters.schedule(state.step)
        before = trainable_params(state.params, frozen)
        updates, opt_state = optimizer.update(grads, state.opt_state, before, learning_rate=rate)
        updates = task.limited(updates, state.step)
        params = merge_trainable(state.params, optax.apply_updates(before, updates), frozen)
        metrics["grad_norm"] = optax.global_norm(grads)
        average = None if state.average is None else averaged(state, params, config.optimizer.average)
        new = TrainState(state.step + 1, params, opt_state, average, _of_rows(memory))
        if config.optimizer.skip_nonfinite:
            is_finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
            kept = jax.tree.map(lambda a, b: jnp.where(is_finite, b, a), state, new)
            new = kept.replace(step=new.step)
            if new.memory is not None:  # what the step before has left is not the text before the next one
                new = new.replace(memory=new.memory.where(is_finite))
        return new, metrics

    return jax.jit(
        train_step,
        in_shardings=(layout.state, batch_sharding(mesh), replicated(mesh)),
        out_shardings=(layout.state, replicated(mesh)),
        donate_argnums=0,
        compiler_options=compiler_options(mesh),
    )


def _gathered(task: Task, state: TrainState, layout: Layout, mesh: Mesh) -> dict:
    """Returns the params as `task.loss` reads them."""
    params = task.cast(state.params)
    if mesh.devices.flat[0].platform == "gpu":
        # XLA would gather first and cast then, which sends twice as much.
        params = jax.lax.with_sharding_constraint(params, layout.state.params)
        params = jax.lax.optimization_barrier(params)
    return jax.lax.with_sharding_constraint(params, layout.compute)


def _inputs(task: Task, state: TrainState, batch: dict) -> tuple[dict, jax.Array]:
    """Returns the batch as `task.loss` reads it, and the numbers of its rows."""
    batch = task.normalize(batch)
    rows = batch.pop("dropout_rows", jnp.arange(len(jax.tree.leaves(batch)[0])))
    return (batch if state.memory is None else batch | {"memory": state.memory}), rows


def _in_groups(compute, mesh: Mesh, params: dict, *arrays):
    """Computes the rows at each index along `data` by themselves: what is returned of them, `[ways, ...]`."""
    groups = jax.tree.map(lambda x: x.reshape(mesh.shape["data"], -1, *x.shape[1:]), arrays)
    axes = None, *[0] * len(arrays)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(RULES_WITHIN_DATA):
        return jax.vmap(compute, axes, axis_name=GROUPS, spmd_axis_name="data")(params, *groups)


def _of_rows(of_groups):
    """`[ways, rows / ways, ...]` -> `[rows, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), of_groups)


def _make_remember(layout: Layout, mesh: Mesh) -> Callable:
    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1, out_shardings=layout.state)
    def remember(task: Task, state: TrainState, batch: dict) -> TrainState:
        params = _gathered(task, state, layout, mesh)
        batch, _ = _inputs(task, state, batch)
        memory = _in_groups(lambda params, part: task.loss(params, part, None)[1]["memory"], mesh, params, batch)
        return state.replace(memory=_of_rows(memory))

    return remember
