"""Optimizers of optax and optax.contrib by their names there: adamw, lion, adafactor, sm3, ...

They keep their own defaults, which `optimizer.options` changes ("b1=0.95 b2=0.98"). Weight decay is ours: it is of
matrices only, and multiplied by the learning rate.
"""

import ast
import inspect
from collections.abc import Callable

import jax
import optax
import optax.contrib

from bertjax.common.errors import UserError
from bertjax.training.optim import groups

DECAYS = ("weight_decay", "weight_decay_rate")  # arguments that are set to 0: weight decay is ours
NO_OPTIONS = ("learning_rate", "adam_learning_rate", *DECAYS, "adam_weight_decay", "weight_decay_mask")
# Optimizers that cannot be used: rprop's state begins with the learning rate, schedule_free evaluates other params than
# it trains; and parts of optimizers.
UNFIT = ("rprop", "schedule_free", "scale_by", "_")


def has(name: str) -> bool:
    return _find(name) is not None


def _find(name: str) -> Callable | None:
    for module in (optax, optax.contrib):
        made = getattr(module, name, None)
        is_optimizer = inspect.isfunction(made) and not name.startswith(UNFIT)
        if is_optimizer and "learning_rate" in inspect.signature(made).parameters:
            return made
    return None


def factory(name: str):
    """Returns the factory of an optimizer that optax has."""
    made = _find(name)

    def make(config, axes) -> list[optax.GradientTransformation]:
        del axes
        options = parse(config.options, made)
        own = [decay for decay in DECAYS if decay in inspect.signature(made).parameters]
        return updates_of(config, lambda learning_rate: made(learning_rate, **dict.fromkeys(own, 0.0), **options))

    return make


def updates_of(config, made: Callable) -> list[optax.GradientTransformation]:
    """Returns transformations that do as optax's optimizer `made(learning_rate)`, with our weight decay and groups."""
    return [_with_given_learning_rate(made), _finish(config)]


def _with_given_learning_rate(made: Callable) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer anew in each step, for its learning rate; what it begins with does not depend on that."""

    def update(grads, state, params, *, learning_rate, **_):
        return made(learning_rate).update(grads, state, params)

    return optax.GradientTransformationExtraArgs(lambda params: made(0.0).init(params), update)


def _finish(config) -> optax.GradientTransformationExtraArgs:
    """Multiplies each update by the factor of its group's learning rate, and subtracts the weight decay."""

    def update(updates, state, params, *, learning_rate, **_):
        def finished(path, update, param):
            factor, decay = groups.factor_of(config, path), groups.decay_of(config, path)
            update = update if factor == 1 else factor * update
            return update - factor * decay * learning_rate * param if decay else update

        return jax.tree_util.tree_map_with_path(finished, updates, params), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def parse(text: str, made: Callable) -> dict:
    """Parses "b1=0.95 nesterov=True". Raises `UserError` for an argument that `made` does not have."""
    known = [name for name in inspect.signature(made).parameters if name not in NO_OPTIONS]
    options = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in known or not value:
            raise UserError(
                f"config.optimizer.options = {text!r}: {word!r} is not understood; write NAME=VALUE; "
                f"{made.__name__} has {', '.join(known)}"
            )
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value  # a word, such as the name of a type
    return options
