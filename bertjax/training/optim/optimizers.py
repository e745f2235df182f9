"""Makes the optimizer of a config: gradient clipping, then the optimizer `config.optimizer.name`.

A factory of an optimizer takes `config.optimizer` and the logical axes of all params (see `distributed.rules`). The
axes show which dimensions of an array stack several matrices. The factory returns a list of optax transformations,
which are chained. Each `update` receives the `learning_rate` of the step as a keyword argument. The output of the last
transformation is added to the params.
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

Factory = Callable[..., Sequence[optax.GradientTransformation]]  # (config.optimizer, axes) -> transformations

WITH_FIELDS = ("adam", "lamb", "stable_adamw")  # bertjax's optimizers without `optimizer.options`
BUILT_IN = (*WITH_FIELDS, "muon")
OPTIMIZERS: Registry[Factory] = Registry(
    "optimizer",
    "optimizer.name",
    {name: f"bertjax.training.optim.{name}:{name}" for name in BUILT_IN},
    hint=", or one of optax such as adamw or lion",
)
register = OPTIMIZERS.register


def make_optimizer(
    config: ConfigDict, axes: dict, layer_factors: dict | None = None
) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer of `config.optimizer`. Its `update` takes the `learning_rate` of the step as a keyword.

    Register a factory to add an optimizer: (config.optimizer, axes) -> a list of optax transformations. Gradients are
    clipped before the first transformation. Each `update` receives the keyword `learning_rate`, a float32 scalar. The
    output of the last transformation is added to the params.

    Args:
      config: `config.optimizer`.
      axes: a tree of `PartitionSpec`s, one for each param, as `nn.get_partition_spec` returns it.
      layer_factors: a tree of one factor per param, the result of `frozen.layer_factors`. The factors multiply the
        final updates, including the weight decay; None for factors of 1.

    Raises:
      UserError: if `config.name` is not the name of an optimizer.
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
    """Returns the factory of an optimizer of bertjax, else of a registered optimizer, else of an optimizer of optax."""
    if name not in OPTIMIZERS.names() and from_optax.has_optimizer(name):
        return from_optax.factory_of(name)
    return OPTIMIZERS.get(name)


def has_constant_peak(config: ConfigDict) -> bool:
    """Returns whether the compiled step contains `config.optimizer.learning_rate`, the peak, as a constant.

    A different peak then needs another compilation. The learning rate of each step is an input in any case.
    """
    return getattr(_find(config.name), "has_constant_peak", False)


def validate(config: ConfigDict) -> None:
    """Raises `UserError` if the name, the options or the groups of `config.optimizer` are invalid."""
    factory = _find(config.name)
    is_from_optax = from_optax.has_optimizer(config.name) and config.name not in OPTIMIZERS.names()
    groups.validate(config)
    if config.options and config.name in WITH_FIELDS:
        raise UserError(
            f"config.optimizer.options = {config.options!r}: {config.name} has no options; set the fields of "
            f"config.optimizer, such as beta1"
        )
    if is_from_optax or config.name == "muon":
        _validate_optax(config, factory)


def _validate_optax(config: ConfigDict, factory: Factory) -> None:
    """Traces an update of a small model; raises `UserError` if the options or the optimizer are not supported."""
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
    except Exception as error:  # optax raises errors of any type for invalid arguments
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"config.optimizer.name = {config.name!r}: an update with options {config.options!r}, a gradient and a "
            f"learning rate fails ({reason}); choose other options or another optimizer"
        ) from None
    if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
        raise UserError(
            f"config.optimizer.name = {config.name!r}: the state has a random key, which checkpoints cannot store; "
            "choose an optimizer without randomness"
        )


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients by the same factor so that their global norm is at most `max_norm`.

    Multiplies by one scalar, which XLA fuses with the next operation. XLA does not fuse the division of
    `optax.clip_by_global_norm`.
    """

    def clip(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        scale = max_norm / jnp.maximum(optax.global_norm(updates), max_norm)
        return jax.tree.map(lambda g: scale * g, updates)

    return optax.stateless(clip)
