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


def scale_by_adam(beta1: float, beta2: float, epsilon: float, bias_correction: bool) -> optax.GradientTransformation:
    """Scales updates as Adam, with or without bias correction.

    google-research/bert has no bias correction. optax.scale_by_adam always has bias correction.
    """

    def init(params: optax.Params) -> AdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamState(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(
        updates: optax.Updates, state: AdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdamState]:
        del params
        count = state.count + 1
        mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mean, updates)
        square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.square, updates)
        mean_scale = 1 - beta1**count if bias_correction else 1.0
        square_scale = 1 - beta2**count if bias_correction else 1.0
        updates = jax.tree.map(lambda m, v: (m / mean_scale) / (jnp.sqrt(v / square_scale) + epsilon), mean, square)
        return updates, AdamState(count, mean, square)

    return optax.GradientTransformation(init, update)
