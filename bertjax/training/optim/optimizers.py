"""Makes the optimizer of a config: clips the gradients, then applies the optimizer that `optimizer.name` names.

A factory of an optimizer takes `config.optimizer` and the logical axes of all params (see `distributed.rules`), which
show the matrices that are stacked in one array. It returns a list of optax transformations that are chained. Their
`update` also gets the `learning_rate` of the step. The output of the last transformation is added to the params.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry
from bertjax.training.optim import from_optax, groups

Factory = Callable[..., Sequence[optax.GradientTransformation]]

WITH_FIELDS = ("adam", "lamb", "stable_adamw")  # bertjax's optimizers without `optimizer.options`
BUILT_IN = (*WITH_FIELDS, "muon")
OPTIMIZERS: Registry[Factory] = Registry(
    "optimizer",
    "optimizer.name",
    {name: f"bertjax.training.optim.{name}:{name}" for name in BUILT_IN},
    others=", or one of optax such as adamw or lion",
)
register = OPTIMIZERS.register


def make_optimizer(
    config: ConfigDict, axes: dict, layer_factors: dict | None = None
) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer of `config.optimizer`. Its `update` takes the step's `learning_rate` as a keyword.

    Args:
      config: `config.optimizer`.
      axes: a tree of `PartitionSpec`s, one for each param, as `nn.get_partition_spec` returns it.
      layer_factors: factors of the final updates, weight decay included, as `frozen.layer_factors` returns them; None
        for factors of 1.
    """
    optimizer = optax.chain(clip_by_global_norm(config.max_grad_norm), *_find(config.name)(config, axes))
    if layer_factors is None:
        return optimizer

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = optimizer.update(updates, state, params, **extra_args)
        return jax.tree.map(jnp.multiply, updates, layer_factors), state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _find(name: str) -> Factory:
    """Returns the factory of an optimizer. Looks in bertjax, in the registered optimizers, and then in optax."""
    if name not in OPTIMIZERS.names() and from_optax.has(name):
        return from_optax.factory(name)
    return OPTIMIZERS.get(name)


def compiles_peak(config: ConfigDict) -> bool:
    """Returns whether the compiled step contains `learning_rate` of `config.optimizer` as a constant.

    The learning rate of the schedule is an input of the step, not a constant.
    """
    return getattr(_find(config.name), "compiles_peak", False)


def validate(config: ConfigDict) -> None:
    """Raises `UserError` if the name, the options or the groups of `config.optimizer` are invalid."""
    factory, is_optaxs = _find(config.name), from_optax.has(config.name) and config.name not in OPTIMIZERS.names()
    groups.validate(config)
    if config.options and config.name in WITH_FIELDS:
        raise UserError(
            f"config.optimizer.options = {config.options!r}: {config.name} has no options; set the fields of "
            f"config.optimizer, such as beta1"
        )
    if is_optaxs or config.name == "muon":
        _validate_optax(config, factory)


def _validate_optax(config: ConfigDict, factory: Factory) -> None:
    """Traces an update of a small model; raises `UserError` if the options or the state of the optimizer are unfit."""
    params = {"dense": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}
    axes = {"dense": {"kernel": PartitionSpec("embed", "mlp")}}

    def update(params: dict) -> tuple[optax.OptState, optax.Updates]:
        optimizer = optax.chain(*factory(config, axes))
        state = optimizer.init(params)
        return state, optimizer.update(params, state, params, learning_rate=jnp.float32(1))[0]

    try:
        state, _ = jax.eval_shape(update, params)
    except UserError:
        raise
    except Exception as error:  # optax raises any type for invalid arguments
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"config.optimizer.name = {config.name!r}: cannot be used with options {config.options!r}, a gradient and "
            f"a learning rate alone ({reason})"
        ) from None
    if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
        raise UserError(
            f"config.optimizer.name = {config.name!r}: keeps a random key, which checkpoints cannot hold; choose an "
            "optimizer without randomness"
        )


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients by the same factor so that their global norm is at most `max_norm`.

    Multiplies by one number, which XLA fuses with the next operation. optax divides, which XLA does not fuse.
    """

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        scale = max_norm / jnp.maximum(optax.global_norm(updates), max_norm)
        return jax.tree.map(lambda g: scale * g, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
