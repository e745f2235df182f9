"""Adam with decoupled weight decay, as google-research/bert's optimization.py has it; LAMB for large batches."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Schedule(NamedTuple):
    """Linear warm-up, then linear decay to 0. Its numbers are data to a compiled step, so that many runs share one.

    The decay counts from step 0 (optimization.create_optimizer), so the peak is never quite reached: just after warm-up
    the rate is `peak * (1 - warmup_steps / total_steps)`.
    """

    peak: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: int | jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        decayed = self.peak * (1 - jnp.minimum(step, self.total_steps) / self.total_steps)
        return jnp.where(step < self.warmup_steps, self.peak * step / jnp.maximum(self.warmup_steps, 1), decayed)


def make_schedule(config, total_steps: int) -> Schedule:
    """The learning rates of `config.optimizer`, whose warm-up is a number of steps or a share of them all."""
    if "warmup_proportion" in config:
        return Schedule(config.learning_rate, int(config.warmup_proportion * total_steps), total_steps)
    return Schedule(config.learning_rate, config.warmup_steps, total_steps)


def scale_by_given_learning_rate() -> optax.GradientTransformationExtraArgs:
    """Last of a chain: `update` wants the rate of the step as `learning_rate`."""

    def update(updates, state, params=None, *, learning_rate, **_):
        del params
        return jax.tree.map(lambda u: -learning_rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class AdamState(NamedTuple):
    count: jax.Array
    mean: optax.Updates
    square: optax.Updates


def scale_by_adam(beta1: float, beta2: float, epsilon: float, bias_correction: bool) -> optax.GradientTransformation:
    """Adam's update. Google's optimizer has no bias correction, which optax's own cannot leave out."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamState(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(grads, state, params=None):
        del params
        count = state.count + 1
        mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mean, grads)
        square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.square, grads)
        mean_scale = 1 - beta1**count if bias_correction else 1.0
        square_scale = 1 - beta2**count if bias_correction else 1.0
        updates = jax.tree.map(lambda m, v: (m / mean_scale) / (jnp.sqrt(v / square_scale) + epsilon), mean, square)
        return updates, AdamState(count, mean, square)

    return optax.GradientTransformation(init, update)


def matrices(params):
    """True for kernels and embeddings, which weight decay applies to; False for biases and LayerNorm."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """LAMB's layerwise step (You et al. 2020, algorithm 2): scales the update of a matrix to the size of the matrix.

    Each matrix of each layer by itself, query, key and value too, although they are stacked in one array. Biases and
    LayerNorm are left alone, as in the authors' code.
    """

    def norms(path, x):
        """Of each matrix that is stacked in `x`, in a shape that broadcasts against it."""
        names = [key.key for key in path]
        stacked = [0] if "layers" in names else []
        if "query_key_value" in names:  # [layers, embed, 3, heads, kv]
            stacked.append(2)
        axes = tuple(axis for axis in range(x.ndim) if axis not in stacked)
        return jnp.sqrt(jnp.square(x).sum(axes, keepdims=True))

    def update(updates, state, params):
        def scale(path, u, p, is_matrix):
            if not is_matrix:
                return u
            size, step = norms(path, p), norms(path, u)
            return u * jnp.where((size > 0) & (step > 0), size / jnp.where(step > 0, step, 1), 1)

        return jax.tree_util.tree_map_with_path(scale, updates, params, matrices(params)), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_optimizer(config) -> optax.GradientTransformationExtraArgs:
    """The optimizer of `config.optimizer`; its `update` wants a `learning_rate` as well."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        scale_by_adam(config.beta1, config.beta2, config.epsilon, config.bias_correction),
        optax.add_decayed_weights(config.weight_decay, matrices),
        *([scale_by_trust_ratio()] if config.name == "lamb" else []),
        scale_by_given_learning_rate(),
    )
