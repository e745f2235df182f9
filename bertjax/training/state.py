"""What a training run is at a step: params, optimizer state, step. Nothing else is needed to go on."""

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bertjax.sharding.mesh import param_shardings, replicated


@flax.struct.dataclass
class TrainState:
    step: jax.Array  # int32 scalar: updates done
    params: dict
    opt_state: optax.OptState


def state_shardings(init_params, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """A `NamedSharding` for every array of the state. `init_params(key)` gives logically partitioned params."""
    boxed = jax.eval_shape(init_params, jax.random.key(0))
    params = param_shardings(boxed, mesh)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, nn.meta.unbox(boxed)),
        params,
        transform_non_params=lambda _: replicated(mesh),
    )
    return TrainState(replicated(mesh), params, opt_state)


def _first_state(init_params, optimizer: optax.GradientTransformation):
    def init(key):
        params = nn.meta.unbox(init_params(key))
        return TrainState(jnp.zeros([], jnp.int32), params, optimizer.init(params))

    return init


def abstract_state(init_params, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """Shapes, types and shardings of a state, without its numbers."""

    shapes = jax.eval_shape(_first_state(init_params, optimizer), jax.random.key(0))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def init_state(init_params, optimizer: optax.GradientTransformation, shardings: TrainState, seed: int) -> TrainState:
    """The state of step 0 with random params; each device makes only its own part."""

    return jax.jit(_first_state(init_params, optimizer), out_shardings=shardings)(jax.random.key(seed))
