"""Optimizers of optax and optax.contrib, by their names in optax: adamw, lion, adafactor, sm3, ...

`config.optimizer.options`, such as "b1=0.95 b2=0.98", replaces defaults of optax. bertjax disables the weight decay of
optax and adds its own weight decay, which applies to matrices only and is multiplied by the learning rate.
"""

import ast
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.training.optim import groups

OptaxFactory = Callable[..., optax.GradientTransformation]  # learning rate, options -> optimizer

WEIGHT_DECAY_ARGUMENTS = ("weight_decay", "weight_decay_rate")  # set to 0, because bertjax adds the weight decay
# Arguments that `optimizer.options` cannot set.
RESERVED_ARGUMENTS = (
    "learning_rate",
    "adam_learning_rate",
    *WEIGHT_DECAY_ARGUMENTS,
    "adam_weight_decay",
    "weight_decay_mask",
)
# Prefixes of unsupported optimizers, and of functions that are only parts of optimizers. The initial state of rprop
# depends on the learning rate. schedule_free evaluates other params than the params that it trains.
UNSUPPORTED = ("rprop", "schedule_free", "scale_by", "_")


def has_optimizer(name: str) -> bool:
    """Returns whether optax has a supported optimizer of this name."""
    return _find(name) is not None


def _find(name: str) -> OptaxFactory | None:
    """Returns the function of optax that makes the optimizer; None if optax has no supported optimizer of this name."""
    for module in (optax, optax.contrib):
        optimizer = getattr(module, name, None)
        if inspect.isfunction(optimizer) and not name.startswith(UNSUPPORTED):
            if "learning_rate" in inspect.signature(optimizer).parameters:
                return optimizer
    return None


def factory_of(name: str) -> Callable[[ConfigDict, dict], list[optax.GradientTransformation]]:
    """Returns the factory (config.optimizer, axes) -> transformations. Raises `UserError` for an unknown name."""
    optimizer = _find(name)
    if optimizer is None:
        raise UserError(f"config.optimizer.name = {name!r}: optax has no supported optimizer of this name")

    def make(config: ConfigDict, axes: dict) -> list[optax.GradientTransformation]:
        del axes
        options = parse_options(config.options, optimizer)
        no_decay = {decay: 0.0 for decay in WEIGHT_DECAY_ARGUMENTS if decay in inspect.signature(optimizer).parameters}
        return transformations_of(config, lambda learning_rate: optimizer(learning_rate, **no_decay, **options))

    return make


def transformations_of(config: ConfigDict, make: OptaxFactory) -> list[optax.GradientTransformation]:
    """Returns the transformations of an optimizer of optax, with bertjax's weight decay and parameter groups.

    Args:
      config: `config.optimizer`.
      make: learning rate -> optimizer of optax.
    """
    return [_with_learning_rate_input(make), _with_groups(config)]


def _with_learning_rate_input(make: OptaxFactory) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes the learning rate as an argument of `update`.

    Each call of `update` makes the optimizer again, with the learning rate of the step. The initial state must
    therefore not depend on the learning rate.
    """

    def update(
        updates: optax.Updates, state: Any, params: Any = None, *, learning_rate: jax.Array, **_: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        return make(learning_rate).update(updates, state, params)

    return optax.GradientTransformationExtraArgs(lambda params: make(0.0).init(params), update)


def _with_groups(config: ConfigDict) -> optax.GradientTransformationExtraArgs:
    """Multiplies each update by the learning rate factor of the param's group, and subtracts the weight decay."""

    def scale_all(updates: optax.Updates, params: optax.Params | None, learning_rate: jax.Array) -> optax.Updates:
        def scaled(path: tuple, update: jax.Array, param: jax.Array) -> jax.Array:
            factor, decay = groups.learning_rate_factor_of(config, path), groups.weight_decay_of(config, path)
            update = update if factor == 1 else factor * update
            return update - factor * decay * learning_rate * param if decay else update

        return jax.tree_util.tree_map_with_path(scaled, updates, params)

    return groups.stateless_with_learning_rate(scale_all)


def parse_options(text: str, make: OptaxFactory) -> dict[str, Any]:
    """Parses options such as "b1=0.95 nesterov=True". Raises `UserError` for an unknown argument of `make`."""
    known = [name for name in inspect.signature(make).parameters if name not in RESERVED_ARGUMENTS]
    options = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in known or not value:
            raise UserError(
                f"config.optimizer.options = {text!r}: {word!r} is not understood; write NAME=VALUE, where NAME is "
                f"an argument of {getattr(make, '__name__', 'the optimizer')}: {', '.join(known)}"
            )
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value  # a word, such as the name of a type
    return options
