"""StableAdamW (Wortsman et al. 2023, algorithm 2), with weight decay that does not depend on the peak learning rate.

A step would be too large if a gradient is much larger than its second moment expects. StableAdamW therefore divides the
learning rate of each tensor by the root mean square of gradient / sqrt(second moment), if this is above 1. It always
has Adam's bias correction.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from bertjax.distributed.rules import stacked
from bertjax.training.optim import groups


def stable_adamw(config: ConfigDict, axes: dict) -> list[optax.GradientTransformation]:
    """Returns the transformations of StableAdamW."""
    return [
        scale_by_stable_adam(config.beta1, config.beta2, config.epsilon, axes),
        # At the peak learning rate, a step subtracts `weight_decay` times each matrix.
        groups.add_weight_decay(config, scale=1 / config.learning_rate),
        groups.scale_by_learning_rate(config),
    ]


# A different peak learning rate compiles the step again.
stable_adamw.compiles_peak = True  # type: ignore[attr-defined]


class StableAdamState(NamedTuple):
    """The number of updates and the moving averages of the gradients and of their squares."""

    count: jax.Array  # type: ignore[assignment]  # hides `tuple.count`; checkpoints store this name
    mean: optax.Updates
    square: optax.Updates


def scale_by_stable_adam(beta1: float, beta2: float, epsilon: float, axes: dict) -> optax.GradientTransformation:
    """Scales updates as Adam with bias correction, and divides each tensor's update by its `excess`.

    An array may stack the tensors of all layers, or of query, key and value. Each tensor has its excess.

    Args:
      beta1: the decay of the first moment.
      beta2: the decay of the second moment.
      epsilon: a number that is added to the root of the second moment.
      axes: the logical axes of the params.
    """

    def init(params: optax.Params) -> StableAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return StableAdamState(jnp.zeros([], jnp.int32), zeros, zeros)

    def scaled(axes: Any, grad: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        tensor_axes = tuple(axis for axis in range(grad.ndim) if axis not in stacked(axes))
        ratio = jnp.square(grad) / jnp.maximum(square, epsilon**2)
        excess = jnp.maximum(jnp.sqrt(ratio.mean(tensor_axes, keepdims=True)), 1)
        return mean / (jnp.sqrt(square) + epsilon) / excess

    def update(
        updates: optax.Updates, state: StableAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, StableAdamState]:
        del params
        count = state.count + 1
        mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mean, updates)
        square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.square, updates)
        corrected = (
            jax.tree.map(lambda x, beta=beta: x / (1 - beta**count), moment)
            for moment, beta in ((mean, beta1), (square, beta2))
        )
        return jax.tree.map(scaled, axes, updates, *corrected), StableAdamState(count, mean, square)

    return optax.GradientTransformation(init, update)
