"""Adam with decoupled weight decay, as in optimization.py of google-research/bert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from bertjax.training.optim import groups


def adam(config: ConfigDict, axes: dict) -> list[optax.GradientTransformation]:
    """Returns the transformations of Adam."""
    del axes
    return [
        scale_by_adam(config.beta1, config.beta2, config.epsilon, config.bias_correction),
        groups.add_weight_decay(config),
        groups.scale_by_learning_rate(config),
    ]


class AdamState(NamedTuple):
    """The number of updates, and the moving averages of the gradients and of the squared gradients."""

    count: jax.Array  # type: ignore[assignment]  # overrides `tuple.count`; checkpoints contain this name
    mean: optax.Updates
    square: optax.Updates


def init_moments(params: optax.Params) -> AdamState:
    """Returns the state before the first update."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return AdamState(jnp.zeros([], jnp.int32), zeros, zeros)


def update_moments(state: AdamState, gradients: optax.Updates, beta1: float, beta2: float) -> AdamState:
    """Returns the state after an update with these gradients; `beta1` and `beta2` are the decay rates."""
    mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mean, gradients)
    square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.square, gradients)
    return AdamState(state.count + 1, mean, square)


def scale_by_adam(beta1: float, beta2: float, epsilon: float, bias_correction: bool) -> optax.GradientTransformation:
    """Scales updates as Adam, with or without bias correction.

    google-research/bert has no bias correction. optax.scale_by_adam always has bias correction.
    """

    def update(
        updates: optax.Updates, state: AdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdamState]:
        del params
        state = update_moments(state, updates, beta1, beta2)
        mean_scale = 1 - beta1**state.count if bias_correction else 1.0
        square_scale = 1 - beta2**state.count if bias_correction else 1.0

        def scaled(mean: jax.Array, square: jax.Array) -> jax.Array:
            return (mean / mean_scale) / (jnp.sqrt(square / square_scale) + epsilon)

        return jax.tree.map(scaled, state.mean, state.square), state

    return optax.GradientTransformation(init_moments, update)
