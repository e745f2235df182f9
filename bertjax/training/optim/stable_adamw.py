"""StableAdamW (Wortsman et al. 2023, algorithm 2), with weight decay that does not depend on the peak learning rate.

A gradient that has outgrown what its second moment remembers would make too large a step; so the learning rate of each
tensor is divided by the root mean square of gradient / sqrt(second moment), where that is above 1. Adam's bias
correction is always made.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bertjax.distributed.rules import stacked
from bertjax.training.optim import groups


def stable_adamw(config, axes) -> list[optax.GradientTransformation]:
    return [
        scale_by_stable_adam(config.beta1, config.beta2, config.epsilon, axes),
        # In proportion to rate / the config's peak: there, a step takes `weight_decay` of each matrix.
        groups.add_weight_decay(config, scale=1 / config.learning_rate),
        groups.scale_by_learning_rate(config),
    ]


stable_adamw.compiles_peak = True  # another peak of the learning rate is another program


class StableAdamState(NamedTuple):
    count: jax.Array
    mean: optax.Updates
    square: optax.Updates


def scale_by_stable_adam(beta1: float, beta2: float, epsilon: float, axes) -> optax.GradientTransformation:
    """Adam's update, divided by the excess of the gradient. `axes`: the logical axes of the params.

    Tensors that are stacked in an array, those of all layers, and query, key and value, are taken one by one.
    """

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return StableAdamState(jnp.zeros([], jnp.int32), zeros, zeros)

    def scaled(axes, grad, mean, square):
        own = tuple(axis for axis in range(grad.ndim) if axis not in stacked(axes))
        ratio = jnp.square(grad) / jnp.maximum(square, epsilon**2)
        excess = jnp.maximum(jnp.sqrt(ratio.mean(own, keepdims=True)), 1)
        return mean / (jnp.sqrt(square) + epsilon) / excess

    def update(grads, state, params=None):
        del params
        count = state.count + 1
        mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mean, grads)
        square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.square, grads)
        corrected = (
            jax.tree.map(lambda x, beta=beta: x / (1 - beta**count), moment)
            for moment, beta in ((mean, beta1), (square, beta2))
        )
        return jax.tree.map(scaled, axes, grads, *corrected), StableAdamState(count, mean, square)

    return optax.GradientTransformation(init, update)
