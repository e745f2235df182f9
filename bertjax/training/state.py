"""The training state (step, params, optimizer state), its shardings, and the split into trainable and frozen params.

Each device stores and updates only a shard of the params and of the optimizer's moments (weight-update sharding, Xu et
al. 2020). A step gathers the params before the forward pass, and reduce-scatters the gradients after the backward pass.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding

from bertjax.distributed.mesh import batch_sharding, param_shardings, replicated, split_over_data
from bertjax.training.optim.frozen import Frozen
from bertjax.training.optim.groups import matrix_mask

MIN_SPLIT_SIZE = 1 << 20  # optimizer arrays with fewer elements are replicated, if they have no param's shape

NO_FROZEN_PARAMS: Frozen = types.MappingProxyType({})

InitParams = Callable[[jax.Array], Any]  # key -> random params, boxed as `nn.LogicallyPartitioned`


class TrainState(flax.struct.PyTreeNode):
    """The arrays that a training step updates."""

    step: jax.Array  # int32 scalar: the number of finished updates
    params: dict
    opt_state: optax.OptState
    average: dict | None = None  # moving average of the params; None if `optimizer.average` is 0
    carry: Any = None  # arrays `[rows, ...]` for the next step; None if the task has no `Carry`

    @property
    def eval_params(self) -> dict:
        """The params for evaluation and inference: `average` if the state has it, else `params`."""
        return self.params if self.average is None else self.average

    def with_initial_params(self, params: dict) -> "TrainState":
        """Returns the state of step 0 with other params; the moving average starts from these params."""
        return self.replace(params=params, average=None if self.average is None else jax.tree.map(jnp.copy, params))


@dataclasses.dataclass(frozen=True)
class StateShardings:
    """The shardings of the arrays of a run.

    Attributes:
      state: the `NamedSharding`s of the stored state.
      gathered: the `NamedSharding`s of the params during a step or an evaluation, gathered over `data`.
      trainable: the `NamedSharding`s of the stored trainable params, which gradients and moments also have.
    """

    state: TrainState
    gathered: dict
    trainable: dict


def trainable_params(params: dict, frozen: Frozen) -> dict:
    """Returns the trainable params.

    If the first n layers of a stacked array `[layers, ...]` are frozen, the result has the array without these layers.

    Args:
      params: all params.
      frozen: {path: n, the number of frozen first layers; None if the whole param is frozen}.
    """
    leaves = flatten_dict(trainable_leaves(params, frozen))
    return unflatten_dict({path: x[frozen[path] :] if path in frozen else x for path, x in leaves.items()})


def trainable_leaves(tree: dict, frozen: Frozen) -> dict:
    """Removes the leaves of whole frozen params from a tree with the structure of the params, such as axes."""
    return unflatten_dict({path: x for path, x in flatten_dict(tree).items() if frozen.get(path, 0) is not None})


def merge_trainable(params: dict, trainable: dict, frozen: Frozen) -> dict:
    """Returns `params` with other trainable params. The inverse of `trainable_params`."""
    merged = flatten_dict(params)
    for path, x in flatten_dict(trainable).items():
        merged[path] = jnp.concatenate([merged[path][: frozen[path]], x]) if path in frozen else x
    return unflatten_dict(merged)


def abstract_axes(init_params: InitParams) -> dict:
    """Returns the logical axes of the params that `init_params(key)` returns, a tree of `PartitionSpec`s."""
    return nn.get_partition_spec(jax.eval_shape(init_params, jax.random.key(0)))


def abstract_trainable(init_params: InitParams, frozen: Frozen) -> dict:
    """Returns the shapes and dtypes of the trainable params among the params that `init_params(key)` returns."""
    return jax.eval_shape(lambda key: trainable_params(nn.meta.unbox(init_params(key)), frozen), jax.random.key(0))


def make_layout(
    init_params: InitParams,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    frozen: Frozen = NO_FROZEN_PARAMS,
    has_average: bool = False,
    init_carry: Callable[[], Any] | None = None,
) -> StateShardings:
    """Returns the layout of a run: the shardings of all arrays.

    Args:
      init_params: key -> params, boxed as `nn.LogicallyPartitioned`.
      optimizer: the optimizer of the trainable params.
      mesh: the device mesh.
      frozen: the frozen params.
      has_average: whether the state has a moving average of the params.
      init_carry: () -> the carry of the first step, arrays `[rows, ...]`; None if the task has no carry.
    """
    boxed = jax.eval_shape(init_params, jax.random.key(0))
    abstract, gathered, axes = nn.meta.unbox(boxed), param_shardings(boxed, mesh), nn.get_partition_spec(boxed)

    def stored(x: Any, axes: Any, sharding: NamedSharding, is_matrix: bool) -> NamedSharding:
        return split_over_data(sharding, axes, x.shape) if is_matrix else sharding

    params = jax.tree.map(stored, abstract, axes, gathered, matrix_mask(abstract))
    trainable = abstract_trainable(init_params, frozen)
    leaves = (trainable_leaves(tree, frozen) for tree in (axes, gathered))
    shardings = jax.tree.map(stored, trainable, *leaves, matrix_mask(trainable))
    opt_state = _opt_state_shardings(jax.eval_shape(optimizer.init, trainable), trainable, shardings, mesh)
    carry = None if init_carry is None else jax.tree.map(lambda x: batch_sharding(mesh), jax.eval_shape(init_carry))
    average = params if has_average else None
    state = TrainState(replicated(mesh), params, opt_state, average, carry)  # type: ignore[arg-type]  # no arrays
    return StateShardings(state, gathered, shardings)


def _opt_state_shardings(opt_state: Any, params: dict, shardings: dict, mesh: Mesh) -> Any:
    """Returns the shardings of an optimizer's arrays.

    An array with the path suffix and the shape of a param has the sharding of the param. Other arrays are split over
    `data` if they have at least MIN_SPLIT_SIZE elements, and replicated otherwise.
    """
    of_params = {
        path: (x.shape, sharding)
        for (path, x), sharding in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings))
    }

    def sharding_of(path: tuple, x: Any) -> NamedSharding:
        suffixes = (of_params.get(path[start:]) for start in range(len(path)))
        shape, sharding = next(filter(None, suffixes), (None, None))
        if sharding is not None and shape == x.shape:
            return sharding
        is_large = x.size >= MIN_SPLIT_SIZE
        return split_over_data(replicated(mesh), (None,) * x.ndim, x.shape) if is_large else replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding_of, opt_state)


def make_init(
    init_params: InitParams,
    optimizer: optax.GradientTransformation,
    layout: StateShardings,
    frozen: Frozen = NO_FROZEN_PARAMS,
    init_carry: Callable[[], Any] = lambda: None,
) -> Callable[[jax.Array], TrainState]:
    """Returns a compiled function: key -> the state of step 0, with random params.

    Each device initializes only its shard. `make_layout` describes the arguments.
    """

    def init(key: jax.Array) -> TrainState:
        params = nn.meta.unbox(init_params(key))
        average = None if layout.state.average is None else jax.tree.map(jnp.copy, params)
        opt_state = optimizer.init(trainable_params(params, frozen))
        return TrainState(jnp.zeros([], jnp.int32), params, opt_state, average, init_carry())

    return jax.jit(init, out_shardings=layout.state)


def abstract_state(init: Callable[[jax.Array], TrainState], layout: StateShardings) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state that `init` returns."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layout.state)
