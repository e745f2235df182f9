"""The training state: step, params and optimizer state, which is all that is needed to resume.

Each device stores and updates only its shard of the params and of the optimizer's moments (weight-update sharding,
Xu et al. 2020). A step starts by gathering the params and ends by reduce-scattering the gradients.
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
from jax.sharding import Mesh

from bertjax.distributed.mesh import batch_sharding, param_shardings, replicated, split_over_data
from bertjax.training.optim.frozen import Frozen
from bertjax.training.optim.groups import matrices

LARGE = 1 << 20  # elements of an array that is worth splitting


NOTHING: Frozen = types.MappingProxyType({})


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # int32 scalar: updates done
    params: dict
    opt_state: optax.OptState
    average: dict | None = None  # moving average of the params, if the config has one
    memory: Any = None  # what the rows of a batch remember of the steps before, if they go on: see `task.Recurrence`

    @property
    def evaluated(self) -> dict:
        """The params that are evaluated and used: the average, or else the params."""
        return self.params if self.average is None else self.average

    def begin_with(self, params: dict) -> "TrainState":
        """Returns the state with other params, before the first step."""
        return self.replace(params=params, average=None if self.average is None else jax.tree.map(jnp.copy, params))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shardings of the arrays of a run."""

    state: TrainState  # `NamedSharding`s of the state between steps
    compute: dict  # `NamedSharding`s of the params during a step or an evaluation
    learnt: dict  # `NamedSharding`s of what is trained, as its gradients and moments have them


def learnt(params: dict, frozen: Frozen) -> dict:
    """Returns what is trained of the params, which alone has gradients and moments."""
    leaves = flatten_dict(learnt_leaves(params, frozen))
    return unflatten_dict({path: x[frozen[path] :] if path in frozen else x for path, x in leaves.items()})


def learnt_leaves(tree: dict, frozen: Frozen) -> dict:
    """Returns a tree that has something for each param, such as its axes, without the leaves of what is all frozen."""
    return unflatten_dict({path: x for path, x in flatten_dict(tree).items() if frozen.get(path, 0) is not None})


def joined(params: dict, part: dict, frozen: Frozen) -> dict:
    """Returns the params with `part` in place of `learnt(params, frozen)`."""
    found = flatten_dict(params)
    for path, x in flatten_dict(part).items():
        found[path] = jnp.concatenate([found[path][: frozen[path]], x]) if path in frozen else x
    return unflatten_dict(found)


def abstract_axes(init_params) -> dict:
    """Returns the logical axes of the params that `init_params(key)` returns, a tree of `PartitionSpec`s."""
    return nn.get_partition_spec(jax.eval_shape(init_params, jax.random.key(0)))


def make_layout(
    init_params,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    frozen: Frozen = NOTHING,
    has_average: bool = False,
    new_memory: Callable[[], Any] | None = None,
) -> Layout:
    """Makes the layout of a run. `init_params(key)` returns logically partitioned params."""
    boxed = jax.eval_shape(init_params, jax.random.key(0))
    abstract, compute, axes = nn.meta.unbox(boxed), param_shardings(boxed, mesh), nn.get_partition_spec(boxed)

    def stored(x, axes, sharding, is_matrix):
        return split_over_data(sharding, axes, x.shape) if is_matrix else sharding

    params = jax.tree.map(stored, abstract, axes, compute, matrices(abstract))
    trained = abstract_learnt(init_params, frozen)
    leaves = (learnt_leaves(each, frozen) for each in (axes, compute))
    own = jax.tree.map(stored, trained, *leaves, matrices(trained))
    opt_state = _shardings_of_moments(jax.eval_shape(optimizer.init, trained), trained, own, mesh)
    memory = None if new_memory is None else jax.tree.map(lambda x: batch_sharding(mesh), jax.eval_shape(new_memory))
    state = TrainState(replicated(mesh), params, opt_state, params if has_average else None, memory)
    return Layout(state, compute, own)


def abstract_learnt(init_params, frozen: Frozen) -> dict:
    """Returns the shapes and types of what is trained of the params that `init_params(key)` returns."""
    return jax.eval_shape(lambda key: learnt(nn.meta.unbox(init_params(key)), frozen), jax.random.key(0))


def _shardings_of_moments(opt_state, params: dict, shardings: dict, mesh: Mesh):
    """Shards an optimizer's arrays: those like a param, in name and shape, as that param; others by their own shape."""
    known = {
        path: (x.shape, sharding)
        for (path, x), sharding in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings))
    }

    def sharding_of(path, x):
        names = (known.get(path[start:]) for start in range(len(path)))
        shape, sharding = next(filter(None, names), (None, None))
        if shape == x.shape:
            return sharding
        is_large = x.size >= LARGE
        return split_over_data(replicated(mesh), (None,) * x.ndim, x.shape) if is_large else replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding_of, opt_state)


def make_init(
    init_params,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    frozen: Frozen = NOTHING,
    new_memory: Callable[[], Any] = lambda: None,
) -> Callable[[jax.Array], TrainState]:
    """Returns a compiled function: key -> the state of step 0, with random params. Each device makes only its shard."""

    def init(key):
        params = nn.meta.unbox(init_params(key))
        average = None if layout.state.average is None else jax.tree.map(jnp.copy, params)
        opt_state = optimizer.init(learnt(params, frozen))
        return TrainState(jnp.zeros([], jnp.int32), params, opt_state, average, new_memory())

    return jax.jit(init, out_shardings=layout.state)


def abstract_state(init: Callable[[jax.Array], TrainState], layout: Layout) -> TrainState:
    """Returns the shapes, types and shardings of the state that `init` returns."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layout.state)
