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
    StateShardings,
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
    """Hyperparameters that are inputs of the compiled step, so that a change needs no recompilation."""

    seed: int
    schedule: Schedule


class Program:
    """The compiled functions of a task.

    Attributes:
      layout: the shardings of the state and of the gathered params.
      state: the abstract state: shapes, dtypes and shardings.
      train_step: the result of `step_of` for the loss of step 0.
      frozen_summary: a line about the number of trainable params and the bytes of the optimizer's state; empty if no
        params are frozen.
    """

    def __init__(self, task: Task, config: ConfigDict, mesh: Mesh):
        """Creates the functions, which are compiled by their first calls."""
        init_params = jax.jit(task.init_params)  # all functions below share one trace
        axes = abstract_axes(init_params)
        frozen = find_frozen(task, config, axes)
        optimizer = _make_optimizer(task, config, axes, frozen)
        init_carry = task.carry.init if task.carry else None
        has_average = config.optimizer.average > 0
        self.layout = make_layout(init_params, optimizer, mesh, frozen, has_average, init_carry)
        self._task, self._config, self._mesh, self._frozen, self._optimizer = task, config, mesh, frozen, optimizer
        self._init = make_init(init_params, optimizer, self.layout, frozen, init_carry or (lambda: None))
        self.state = abstract_state(self._init, self.layout)
        self._steps: dict[str, jax.stages.Wrapped] = {}
        loss, first_config = task.loss_and_config(0)
        self.train_step = self.step_of(loss, first_config)
        in_shardings, out_shardings = (self.layout.state.params,), self.layout.gathered
        self._gather = jax.jit(loss.cast, in_shardings=in_shardings, out_shardings=out_shardings)
        self.frozen_summary = _describe_frozen(task, config, axes, frozen) if frozen else ""

    def init(self, key: jax.Array) -> TrainState:
        """Returns the state of step 0 with random params."""
        return self._init(key)

    def step_of(self, loss: Loss, stage_config: ConfigDict) -> jax.stages.Wrapped:
        """Returns the jitted step of a loss: (state, batch, hyperparameters) -> (state, metrics).

        The first call compiles the step. The step donates the state. Stages with equal `model`, `microbatches` and
        `objective` share a step; these fields determine the loss.

        Args:
          loss: the loss of `Task.loss_and_config`.
          stage_config: the config of `Task.loss_and_config`.
        """
        # The fields that the compiled step depends on and that stages can change.
        key = json.dumps([stage_config.model.to_dict(), stage_config.microbatches, stage_config.get("objective")])
        if key not in self._steps:
            gradients = GradientFunction(loss, self._frozen, stage_config.microbatches)
            self._steps[key] = _make_train_step(
                gradients, self._task.mask_updates, self._optimizer, self.layout, self._mesh, self._config
            )
        return self._steps[key]

    def gather(self, params: dict) -> dict:
        """Casts and gathers the params of a state for `Evaluator.run`."""
        return self._gather(params)


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
        """Returns the number of trainable params, and the bytes of the optimizer's state."""
        trainable = abstract_trainable(task.init_params, frozen)
        state = jax.eval_shape(make_optimizer(config.optimizer, trainable_leaves(axes, frozen)).init, trainable)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        return sum(x.size for x in jax.tree.leaves(trainable)), size

    (trainable, state_bytes), (total, full_bytes) = measure(frozen), measure(NO_FROZEN_PARAMS)
    saved = f"the optimizer's state has {state_bytes:,} bytes, not {full_bytes:,}"
    return f"trains {trainable:,} of {total:,} params; {saved}"


def put_hyperparameters(seed: int, schedule: Schedule, mesh: Mesh) -> Hyperparameters:
    """Copies the hyperparameters to the devices."""
    return jax.device_put(_as_inputs(Hyperparameters(seed, schedule)), replicated(mesh))


def abstract_hyperparameters(config: ConfigDict, mesh: Mesh) -> Hyperparameters:
    """Returns the shapes, dtypes and shardings of the result of `put_hyperparameters`."""
    numbers = _as_inputs(Hyperparameters(config.seed, schedule_of(config, total_steps=1)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype, sharding=replicated(mesh)), numbers)


def _as_inputs(hyperparameters: Hyperparameters) -> Hyperparameters:
    """Converts the numbers to int32 and float32."""

    def number(x: Any) -> np.int32 | np.float32:
        return np.int32(x) if np.issubdtype(np.asarray(x).dtype, np.integer) else np.float32(x)

    return jax.tree.map(number, hyperparameters)


def fits_in_memory(lowered: jax.stages.Lowered, limit: int | None) -> bool:
    """Compiles a program, and returns whether it fits in the memory of a device.

    Args:
      lowered: the lowered program.
      limit: the bytes of device memory; None: only the compiler's limit applies.
    """
    try:
        sizes = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:  # raised by the TPU compiler
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return False
    assert sizes is not None
    needed_bytes = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes  # the output replaces the donated arguments
    return limit is None or needed_bytes <= limit


def averaged(state: TrainState, params: dict, decay: float) -> dict:
    """Returns the exponential moving average of the params after a step.

    The first steps use a smaller decay, min(decay, (1 + step) / (10 + step)), because the average would otherwise
    contain the random initial params for a long time. TensorFlow's ExponentialMovingAverage has the same rule.

    Args:
      state: the state before the step.
      params: the params after the step.
      decay: the decay of `optimizer.average`.
    """
    step = state.step.astype(jnp.float32)
    weight = 1 - jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda old, x: old + weight * (x - old), state.average, params)


def _make_train_step(
    gradients: GradientFunction,
    mask_updates: Callable[[dict, jax.Array], dict],
    optimizer: optax.GradientTransformationExtraArgs,
    layout: StateShardings,
    mesh: Mesh,
    config: ConfigDict,
) -> jax.stages.Wrapped:
    """Returns the jitted training step of a loss. The first call compiles the step.

    The random key of a row is a function of (seed, step, index of the row in the batch). A packed batch has
    `dropout_rows` `[rows]`: the index of the first sequence of each row in the batch before packing. Dropout therefore
    does not depend on the number of packed rows.

    The mesh axis `data` divides the rows into groups. Each group sums its gradients. The step adds these sums once,
    in `config.grad_dtype`.

    With `config.optimizer.skip_nonfinite`, a step whose loss or gradient norm is not finite only increases the step
    number and resets the carry.
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
    """Sums a gradient `[data, ...]` over the mesh axis `data` to `[...]`, with the sharding of the stored param."""
    # `jnp.sum` would convert bfloat16 to float32 before the reduction, which sends twice as many bytes.
    total = jax.lax.reduce(gradient.astype(dtype), jnp.zeros([], dtype), jax.lax.add, (0,))
    return jax.lax.with_sharding_constraint(total, sharding).astype(jnp.float32)


def _skip_nonfinite(state: TrainState, new: TrainState, metrics: dict) -> TrainState:
    """Returns the new state, or the old state with the new step number if the loss or gradient norm is not finite."""
    is_finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    kept = jax.tree.map(lambda a, b: jnp.where(is_finite, b, a), state, new).replace(step=new.step)
    # The old carry belongs to an earlier batch. After a nonfinite step, all rows therefore start without memory.
    if new.carry is not None:
        kept = kept.replace(carry=new.carry.where(is_finite))
    return kept


def gathered_params(loss: Loss, state: TrainState, layout: StateShardings, mesh: Mesh) -> dict:
    """Returns the params for the loss: cast, and gathered from the shards of the stored params."""
    params = loss.cast(state.params)
    if mesh.devices.flat[0].platform == "gpu":
        # Without the barrier, XLA gathers before the cast, which sends twice as many bytes.
        params = jax.lax.with_sharding_constraint(params, layout.state.params)
        params = jax.lax.optimization_barrier(params)
    return jax.lax.with_sharding_constraint(params, layout.gathered)


def loss_inputs(loss: Loss, state: TrainState, batch: dict) -> tuple[dict, jax.Array]:
    """Returns the batch with normalized weights and the carry, and the row indices `[rows]` for the dropout keys."""
    batch = loss.normalize(batch)
    rows = batch.pop("dropout_rows", jnp.arange(len(jax.tree.leaves(batch)[0])))
    return (batch if state.carry is None else batch | {"carry": state.carry}), rows


def vmap_over_data(compute: Callable, mesh: Mesh, params: dict, *arrays: Any) -> Any:
    """Applies a function to each group of rows, into which the mesh axis `data` divides a batch.

    Args:
      compute: (params, *arrays `[rows / data, ...]`) -> arrays.
      mesh: the device mesh.
      params: gathered params.
      *arrays: arrays `[rows, ...]`.

    Returns:
      The results `[data, ...]`.
    """
    groups = jax.tree.map(lambda x: x.reshape(mesh.shape["data"], -1, *x.shape[1:]), arrays)
    axes = None, *[0] * len(arrays)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(RULES_WITHIN_DATA):
        return jax.vmap(compute, axes, axis_name=GROUPS, spmd_axis_name="data")(params, *groups)


def merge_groups(groups: Any) -> Any:
    """Reshapes arrays `[data, rows / data, ...]` to `[rows, ...]`."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), groups)
