"""LAMB (You et al. 2020), an optimizer for batches of thousands of sequences."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from bertjax.distributed.rules import stacked_axes
from bertjax.training.optim import groups
from bertjax.training.optim.adam import scale_by_adam


def lamb(config: ConfigDict, axes: dict) -> list[optax.GradientTransformation]:
    """Returns the transformations of LAMB."""
    return [
        scale_by_adam(config.beta1, config.beta2, config.epsilon, config.bias_correction),
        groups.add_weight_decay(config),
        scale_by_trust_ratio(axes),
        groups.scale_by_learning_rate(config),
    ]


def scale_by_trust_ratio(axes: dict) -> optax.GradientTransformation:
    """Scales the update of each matrix to the norm of the matrix (the trust ratio of algorithm 2).

    An array may stack the matrices of all layers, or of query, key and value. Each matrix has a separate trust ratio.
    Updates of biases and of norm params are not scaled, as in the authors' code.

    Args:
      axes: the logical axes of the params.
    """

    def norms(axes: Any, x: jax.Array) -> jax.Array:
        """Returns the norm of each matrix in `x`, in a shape that broadcasts against `x`."""
        matrix_axes = tuple(axis for axis in range(x.ndim) if axis not in stacked_axes(axes))
        return jnp.sqrt(jnp.square(x).sum(matrix_axes, keepdims=True))

    def scale(axes: Any, u: jax.Array, p: jax.Array, is_matrix: bool) -> jax.Array:
        if not is_matrix:
            return u
        param_norm, update_norm = norms(axes, p), norms(axes, u)
        ratio = param_norm / jnp.where(update_norm > 0, update_norm, 1)
        return u * jnp.where((param_norm > 0) & (update_norm > 0), ratio, 1)

    return optax.stateless(
        lambda updates, params: jax.tree.map(scale, axes, updates, params, groups.matrix_mask(params))
    )
