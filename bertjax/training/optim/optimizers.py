"""Makes the optimizer of a config: gradients are clipped, and an optimizer that is found by name makes updates of them.

An optimizer is a factory: (config.optimizer, axes) -> optax's transformations, one after the other. `axes` are the
logical axes of all params (see `distributed.rules`), by which it can tell the matrices that are stacked in one array.
Their `update` gets the step's `learning_rate` as well, and what the last one returns is added to the params.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry
from bertjax.training.optim import from_optax, groups

Factory = Callable[..., Sequence[optax.GradientTransformation]]

OWN = ("adam", "lamb", "stable_adamw", "muon")
OPTIMIZERS: Registry[Factory] = Registry(
    "optimizer",
    "optimizer.name",
    {name: f"bertjax.training.optim.{name}:{name}" for name in OWN},
    others=", or one of optax such as adamw or lion",
)
register = OPTIMIZERS.register


def make_optimizer(config, axes, layer_factors=None) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer of `config.optimizer`; its `update` also takes `learning_rate`.

    Args:
      axes: a tree of `PartitionSpec`s, one for each param, as `nn.get_partition_spec` returns it.
      layer_factors: a tree of what each update is multiplied by in the end, with its weight decay; None: 1.
    """
    made = optax.chain(clip_by_global_norm(config.max_grad_norm), *_find(config.name)(config, axes))
    if layer_factors is None:
        return made

    def update(grads, state, params, **given):
        updates, state = made.update(grads, state, params, **given)
        return jax.tree.map(jnp.multiply, updates, layer_factors), state

    return optax.GradientTransformationExtraArgs(made.init, update)


def _find(name: str) -> Factory:
    """Returns ours, a registered one, or optax's."""
    if name not in OPTIMIZERS.names() and from_optax.has(name):
        return from_optax.factory(name)
    return OPTIMIZERS.get(name)


def compiles_peak(config) -> bool:
    """Whether a step is compiled with `config.optimizer.learning_rate`, besides the schedule, which is its input."""
    return getattr(_find(config.name), "compiles_peak", False)


def validate(config) -> None:
    """Raises `UserError` if `config.optimizer` names no optimizer, or one that cannot be used as it says."""
    factory, is_optaxs = _find(config.name), from_optax.has(config.name) and config.name not in OPTIMIZERS.names()
    groups.validate(config)
    if config.options and config.name in OWN[:-1]:
        raise UserError(
            f"config.optimizer.options = {config.options!r}: {config.name} takes none; it has the fields of "
            f"config.optimizer, such as beta1"
        )
    if not is_optaxs and config.name != "muon":
        return
    params = {"dense": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}
    axes = {"dense": {"kernel": PartitionSpec("embed", "mlp")}}

    def update(params):
        optimizer = optax.chain(*factory(config, axes))
        state = optimizer.init(params)
        return state, optimizer.update(params, state, params, learning_rate=jnp.float32(1))[0]

    try:
        state, _ = jax.eval_shape(update, params)
    except UserError:
        raise
    except Exception as error:  # somebody else's code, with arguments that the user chose
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"config.optimizer.name = {config.name!r}: cannot be used with options {config.options!r}, a gradient and "
            f"a learning rate alone ({reason})"
        ) from None
    if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
        raise UserError(
            f"config.optimizer.name = {config.name!r}: keeps a random key, which checkpoints cannot hold; choose one "
            "without"
        )


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients down so that their norm is at most `max_norm`.

    A product with one number, which XLA fuses with what follows; optax's division takes a pass of its own.
    """

    def update(grads, state, params=None):
        del params
        scale = max_norm / jnp.maximum(optax.global_norm(grads), max_norm)
        return jax.tree.map(lambda g: scale * g, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
