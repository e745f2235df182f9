"""The compiled training step, the same for all tasks."""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.distributed.mesh import GROUPS, batch_sharding, compiler_options, replicated
from bertjax.distributed.rules import RULES_WITHIN_DATA
from bertjax.nn.ops.dropout import row_keys
from bertjax.training.gradients import GradientFunction
from bertjax.training.optim.frozen import find_frozen, layer_factors
from bertjax.training.optim.optimizers import make_optimizer
from bertjax.training.optim.schedules import Schedule, schedule_of
from bertjax.training.state import (
    NO_FROZEN_PARAMS,
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
from bertjax.training.task import Loss, Task


class Hyperparameters(NamedTuple):
    """Inputs of the compiled step. Runs that differ only in these share a compiled step."""

    seed: int
    schedule: Schedule


class Program(NamedTuple):
    """The compiled functions of a task. Tasks with equal losses and equal shapes of batches can share them.

    Attributes:
      layout: the shardings of the state and of the params.
      init: random key -> the state of step 0.
      state: the shapes, types and shardings of the state.
      train_step: the step of the first loss: (state, batch, hyperparameters) -> (state, metrics). Donates the state.
      step_of: (loss, config) of `Task.loss_and_config` -> the step of this loss. Equal configs share a step.
      gather: stored params -> cast params for `Evaluator.run`.
      frozen_summary: a line about frozen params and the memory that they save; empty if no params are frozen.
    """

    layout: Layout
    init: Callable[[jax.Array], TrainState]
    state: TrainState
    train_step: jax.stages.Wrapped
    step_of: Callable[[Loss, ConfigDict], jax.stages.Wrapped]
    gather: Callable[[dict], dict]
    frozen_summary: str


def make_program(task: Task, config: ConfigDict, mesh: Mesh) -> Program:
    """Returns the compiled functions of a task."""
    init_params = jax.jit(task.init_params)  # one trace serves all functions below
    axes = abstract_axes(init_params)
    frozen = find_frozen(task, config, axes)
    optimizer = _make_optimizer(task, config, axes, frozen)
    init_carry = task.carry.new if task.carry else None
    has_average = config.optimizer.average > 0
    layout = make_layout(init_params, optimizer, mesh, frozen, has_average, init_carry)
    init = make_init(init_params, optimizer, layout, frozen, init_carry or (lambda: None))
    steps: dict[str, jax.stages.Wrapped] = {}

    def step_of(loss: Loss, stage_config: ConfigDict) -> jax.stages.Wrapped:
        """Returns the step of a loss. Stages that compile the same step share it."""
        key = _compiled_fields(stage_config)
        if key not in steps:
            gradients = GradientFunction(loss, frozen, stage_config.microbatches)
            steps[key] = _make_train_step(gradients, task.mask_updates, optimizer, layout, mesh, config)
        return steps[key]

    loss, first_config = task.loss_and_config(0)
    return Program(
        layout,
        init,
        abstract_state(init, layout),
        step_of(loss, first_config),
        step_of,
        jax.jit(loss.cast, in_shardings=(layout.state.params,), out_shardings=layout.gathered),
        _describe_frozen(task, config, axes, frozen) if frozen else "",
    )


def _make_optimizer(
    task: Task, config: ConfigDict, axes: dict, frozen: Frozen
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of the trainable params."""
    trainable_axes, decay, factors = trainable_leaves(axes, frozen), config.optimizer.layer_decay, None
    if decay != 1:
        factors = layer_factors(task, decay, axes, abstract_trainable(task.init_params, frozen), frozen)
    return make_optimizer(config.optimizer, trainable_axes, factors)


def _describe_frozen(task: Task, config: ConfigDict, axes: dict, frozen: Frozen) -> str:
    """Returns the line `Program.frozen_summary`."""

    def measure(frozen: Frozen) -> tuple[int, int]:
        """Returns the number of trainable params, and the bytes of the state of the optimizer."""
        trainable = abstract_trainable(task.init_params, frozen)
        state = jax.eval_shape(make_optimizer(config.optimizer, trainable_leaves(axes, frozen)).init, trainable)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        return sum(x.size for x in jax.tree.leaves(trainable)), size

    (trainable, small), (total, large) = measure(frozen), measure(NO_FROZEN_PARAMS)
    return f"trains {trainable:,} of {total:,} params; the optimizer's state has {small:,} bytes, not {large:,}"


def _compiled_fields(config: ConfigDict) -> str:
    """Returns the fields that stages may change and that the compiled step depends on."""
    return json.dumps([config.model.to_dict(), config.microbatches, config.get("objective")])


def put_hyperparameters(seed: int, schedule: Schedule, mesh: Mesh) -> Hyperparameters:
    """Copies the hyperparameters to the devices."""
    return jax.device_put(_as_inputs(Hyperparameters(seed, schedule)), replicated(mesh))


def abstract_hyperparameters(config: ConfigDict, mesh: Mesh) -> Hyperparameters:
    """Returns the shapes, types and shardings of `put_hyperparameters`."""
    numbers = _as_inputs(Hyperparameters(config.seed, schedule_of(config, total_steps=1)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=replicated(mesh)), numbers)


def _as_inputs(hyperparameters: Hyperparameters) -> Hyperparameters:
    def number(x: Any) -> np.int32 | np.float32:
        return np.int32(x) if np.issubdtype(np.asarray(x).dtype, np.integer) else np.float32(x)

    return jax.tree.map(number, hyperparameters)


def fits_in_memory(lowered: jax.stages.Lowered, limit: int | None) -> bool:
    """Compiles a program, and returns whether it fits in the memory of a device.

    Args:
      lowered: the program.
      limit: the bytes of the memory; None: the memory that the compiler assumes.
    """
    try:
        sizes = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:  # a TPU's compiler
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    assert sizes is not None
    needed = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes  # the output replaces the donated arguments
    return limit is None or needed <= limit


def averaged(state: TrainState, params: dict, decay: float) -> dict:
    """Returns the moving average after a step.

    Early steps have larger weights, so that the first params soon lose their influence, as in TensorFlow's
    ExponentialMovingAverage.
    """
    step = state.step.astype(jnp.float32)
    weight = 1 - jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda old, x: old + weight * (x - old), state.average, params)


def _make_train_step(
    gradients: GradientFunction,
    mask_updates: Callable[[dict, jax.Array], dict],
    optimizer: optax.GradientTransformationExtraArgs,
    layout: Layout,
    mesh: Mesh,
    config: ConfigDict,
) -> jax.stages.Wrapped:
    """Compiles the training step of a loss.

    The dropout of a row depends only on (seed, step, row of the batch). If a batch has `dropout_rows`, these are the
    numbers of its rows, so that the number of packed rows does not change dropout. Each index along `data` sums the
    gradients of its rows. These sums are then reduced across the network, once per step, in `config.grad_dtype`.

    With `config.optimizer.skip_nonfinite`, a step whose loss or gradient is not finite changes only the step number.
    """
    loss, frozen = gradients.loss, gradients.frozen

    def train_step(state: TrainState, batch: dict, hyperparameters: Hyperparameters) -> tuple[TrainState, dict]:
        params = gathered_params(loss, state, layout, mesh)
        batch, rows = loss_inputs(loss, state, batch)
        key = jax.random.fold_in(jax.random.key(hyperparameters.seed, impl="threefry2x32"), state.step)
        keys = row_keys(key, rows)

        (grads, metrics), carry = vmap_over_data(gradients, mesh, params, batch, keys)
        grads = jax.tree.map(functools.partial(_sum_over_data, config.grad_dtype), grads, layout.trainable)
        metrics = jax.tree.map(lambda x: x.sum(0), metrics)

        rate = hyperparameters.schedule(state.step)
        before = trainable_params(state.params, frozen)
        updates, opt_state = optimizer.update(grads, state.opt_state, before, learning_rate=rate)
        updates = mask_updates(updates, state.step)
        params = merge_trainable(state.params, optax.apply_updates(before, updates), frozen)
        metrics["grad_norm"] = optax.global_norm(grads)
        average = None if state.average is None else averaged(state, params, config.optimizer.average)
        new = TrainState(state.step + 1, params, opt_state, average, merge_groups(carry))
        return _skip_nonfinite(state, new, metrics) if config.optimizer.skip_nonfinite else new, metrics

    return jax.jit(
        train_step,
        in_shardings=(layout.state, batch_sharding(mesh), replicated(mesh)),
        out_shardings=(layout.state, replicated(mesh)),
        donate_argnums=0,
        compiler_options=compiler_options(mesh),
    )


def _sum_over_data(dtype: Any, gradient: jax.Array, sharding: Any) -> jax.Array:
    """Sums a gradient `[ways, ...]` to `[...]`, sharded like the stored param."""
    # Not jnp.sum: it would sum, and send, bfloat16 as float32.
    total = jax.lax.reduce(gradient.astype(dtype), jnp.zeros([], dtype), jax.lax.add, (0,))
    return jax.lax.with_sharding_constraint(total, sharding).astype(jnp.float32)


def _skip_nonfinite(state: TrainState, new: TrainState, metrics: dict) -> TrainState:
    """Returns the new state, or the old state with the new step number if a number is not finite."""
    is_finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    kept = jax.tree.map(lambda a, b: jnp.where(is_finite, b, a), state, new).replace(step=new.step)
    if new.carry is not None:  # the carry of the old state does not precede the next batch
        kept = kept.replace(carry=new.carry.where(is_finite))
    return kept


def gathered_params(loss: Loss, state: TrainState, layout: Layout, mesh: Mesh) -> dict:
    """Returns the params as the loss reads them."""
    params = loss.cast(state.params)
    if mesh.devices.flat[0].platform == "gpu":
        # XLA would gather first and cast then, which sends twice as much.
        params = jax.lax.with_sharding_constraint(params, layout.state.params)
        params = jax.lax.optimization_barrier(params)
    return jax.lax.with_sharding_constraint(params, layout.gathered)


def loss_inputs(loss: Loss, state: TrainState, batch: dict) -> tuple[dict, jax.Array]:
    """Returns the batch as the loss reads it, and the numbers of its rows."""
    batch = loss.normalize(batch)
    rows = batch.pop("dropout_rows", jnp.arange(len(jax.tree.leaves(batch)[0])))
    return (batch if state.carry is None else batch | {"carry": state.carry}), rows


def vmap_over_data(compute: Callable, mesh: Mesh, params: dict, *arrays: Any) -> Any:
    """Computes the rows of each index along `data` by themselves. The results are `[ways, ...]`."""
    groups = jax.tree.map(lambda x: x.reshape(mesh.shape["data"], -1, *x.shape[1:]), arrays)
    axes = None, *[0] * len(arrays)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(RULES_WITHIN_DATA):
        return jax.vmap(compute, axes, axis_name=GROUPS, spmd_axis_name="data")(params, *groups)


def merge_groups(groups: Any) -> Any:
    """Returns arrays `[rows, ...]` from arrays `[ways, rows / ways, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), groups)
