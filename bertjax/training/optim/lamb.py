"""LAMB (You et al. 2020), for batches of thousands."""

import jax
import jax.numpy as jnp
import optax

from bertjax.distributed.rules import stacked
from bertjax.training.optim import groups
from bertjax.training.optim.adam import scale_by_adam


def lamb(config, axes) -> list[optax.GradientTransformation]:
    return [
        scale_by_adam(config.beta1, config.beta2, config.epsilon, config.bias_correction),
        groups.add_weight_decay(config),
        scale_by_trust_ratio(axes),
        groups.scale_by_learning_rate(config),
    ]


def scale_by_trust_ratio(axes) -> optax.GradientTransformation:
    """LAMB's trust ratio (algorithm 2): scales the update of each matrix to the norm of the matrix.

    Treats the matrices that are stacked in an array, those of all layers, and query, key and value, one by one. Leaves
    biases and LayerNorm unscaled, as in the authors' code. `axes`: the logical axes of the params.
    """

    def norms(axes, x):
        """Returns the norm of each matrix in `x`, in a shape that broadcasts against it."""
        own = tuple(axis for axis in range(x.ndim) if axis not in stacked(axes))
        return jnp.sqrt(jnp.square(x).sum(own, keepdims=True))

    def update(updates, state, params):
        def scale(axes, u, p, is_matrix):
            if not is_matrix:
                return u
            size, step = norms(axes, p), norms(axes, u)
            return u * jnp.where((size > 0) & (step > 0), size / jnp.where(step > 0, step, 1), 1)

        return jax.tree.map(scale, axes, updates, params, groups.matrices(params)), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
