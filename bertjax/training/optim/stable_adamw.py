"""StableAdamW (Wortsman et al. 2023, algorithm 2), with weight decay that does not depend on the peak learning rate.

StableAdamW is Adam with bias correction and update clipping: it divides the learning rate of each tensor by
`max(1, RMS)`, where RMS is the root mean square of gradient / sqrt(second moment). RMS exceeds 1 if the gradient is
larger than earlier gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from bertjax.distributed.rules import stacked_axes
from bertjax.training.optim import groups
from bertjax.training.optim.adam import AdamState, init_moments, update_moments


def stable_adamw(config: ConfigDict, axes: dict) -> list[optax.GradientTransformation]:
    """Returns the transformations of StableAdamW."""
    return [
        scale_by_stable_adam(config.beta1, config.beta2, config.epsilon, axes),
        # At the peak learning rate, a step subtracts `weight_decay` times each matrix.
        groups.add_weight_decay(config, scale=1 / config.learning_rate),
        groups.scale_by_learning_rate(config),
    ]


# `add_weight_decay` compiles the peak learning rate into the step, see `optimizers.has_constant_peak`.
stable_adamw.has_constant_peak = True  # type: ignore[attr-defined]


def scale_by_stable_adam(beta1: float, beta2: float, epsilon: float, axes: dict) -> optax.GradientTransformation:
    """Scales updates as Adam with bias correction, and divides the update of each tensor by `max(1, RMS)`.

    An array may stack the tensors of all layers, or of query, key and value. Each of these tensors has a separate RMS.

    Args:
      beta1: the decay rate of the first moment.
      beta2: the decay rate of the second moment.
      epsilon: the constant that is added to the square root of the second moment.
      axes: the logical axes of the params.
    """

    def scaled(axes: Any, grad: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        tensor_axes = tuple(axis for axis in range(grad.ndim) if axis not in stacked_axes(axes))
        ratio = jnp.square(grad) / jnp.maximum(square, epsilon**2)
        rms = jnp.sqrt(ratio.mean(tensor_axes, keepdims=True))
        return mean / (jnp.sqrt(square) + epsilon) / jnp.maximum(rms, 1)

    def update(
        updates: optax.Updates, state: AdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdamState]:
        del params
        state = update_moments(state, updates, beta1, beta2)
        corrected = (
            jax.tree.map(lambda x, beta=beta: x / (1 - beta**state.count), moment)
            for moment, beta in ((state.mean, beta1), (state.square, beta2))
        )
        return jax.tree.map(scaled, axes, updates, *corrected), state

    return optax.GradientTransformation(init_moments, update)
