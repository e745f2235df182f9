"""Makes the optimizer of a config: gradients are clipped, and an optimizer that is found by name makes updates of them.

An optimizer is a factory: (config.optimizer, axes) -> optax's transformations, one after the other. `axes` are the
logical axes of all params (see `sharding.rules`), by which it can tell the matrices that are stacked in one array.
Their `update` gets the step's `learning_rate` as well, and what the last one returns is added to the params.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from bertjax.config import UserError
from bertjax.registry import Registry
from bertjax.training.optimizers import from_optax, groups

Factory = Callable[..., Sequence[optax.GradientTransformation]]

OPTIMIZERS: Registry[Factory] = Registry(
    "optimizer",
    "optimizer.name",
    {name: f"bertjax.training.optimizers.{name}:{name}" for name in ("adam", "lamb", "muon")},
)
register = OPTIMIZERS.register


def make_optimizer(config, axes) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer of `config.optimizer`; its `update` also takes `learning_rate`.

    Args:
      axes: a tree of `PartitionSpec`s, one for each param, as `nn.get_partition_spec` returns it.

    Raises `UserError` if a group of `config.groups` has no params.
    """
    groups.check_params(config, axes)
    return optax.chain(clip_by_global_norm(config.max_grad_norm), *_find(config.name)(config, axes))


def _find(name: str) -> Factory:
    """Returns ours, a registered one, or optax's."""
    if name not in OPTIMIZERS.names() and from_optax.has(name):
        return from_optax.factory(name)
    return OPTIMIZERS.get(name)


def validate(config) -> None:
    """Raises `UserError` if `config.optimizer` names no optimizer, or one that cannot be made or used as it says."""
    made = _find(config.name)
    groups.validate(config)
    if config.options and config.name in ("adam", "lamb"):
        raise UserError(
            f"config.optimizer.options = {config.options!r}: only optimizers of optax take options; {config.name} has "
            f"the fields of config.optimizer"
        )
    params = {"dense": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}
    axes = {"dense": {"kernel": PartitionSpec("embed", "mlp")}}

    def update(params):
        optimizer = optax.chain(*made(config, axes))
        return optimizer.update(params, optimizer.init(params), params, learning_rate=jnp.float32(1))[0]

    try:
        jax.eval_shape(update, params)
    except (TypeError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"config.optimizer.name = {config.name!r}: optax's cannot be used with options {config.options!r}, a "
            f"gradient and a learning rate alone ({reason})"
        ) from None


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients down so that their norm is at most `max_norm`.

    A product with one number, which XLA fuses with what follows; optax's division takes a pass of its own.
    """

    def update(grads, state, params=None):
        del params
        scale = max_norm / jnp.maximum(optax.global_norm(grads), max_norm)
        return jax.tree.map(lambda g: scale * g, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
