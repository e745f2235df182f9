"""Adam with decoupled weight decay, as in google-research/bert's optimization.py; LAMB for large batches."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class Schedule(NamedTuple):
    """Linear warm-up, then linear decay to 0. A compiled step takes its fields as inputs, so that runs can share it.

    The decay counts from step 0 (optimization.create_optimizer), so the peak is never quite reached: right after
    warm-up the rate is `peak * (1 - warmup_steps / total_steps)`.
    """

    peak: float
    warmup_steps: int
    total_steps: int

    def __call__(self, step: int | jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        decayed = self.peak * (1 - jnp.minimum(step, self.total_steps) / self.total_steps)
        return jnp.where(step < self.warmup_steps, self.peak * step / jnp.maximum(self.warmup_steps, 1), decayed)


def make_schedule(config, total_steps: int) -> Schedule:
    """Makes the schedule of `config.optimizer`, with `warmup_steps` or a `warmup_proportion` of all steps."""
    if "warmup_proportion" in config:
        return Schedule(config.learning_rate, int(config.warmup_proportion * total_steps), total_steps)
    return Schedule(config.learning_rate, config.warmup_steps, total_steps)


def scale_by_given_learning_rate() -> optax.GradientTransformationExtraArgs:
    """The last transformation of a chain; `update` takes the learning rate of the step as `learning_rate`."""

    def update(updates, state, params=None, *, learning_rate, **_):
        del params
        return jax.tree.map(lambda u: -learning_rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients down so that their norm is at most `max_norm`.

    A product with one number, which XLA fuses with what follows; optax's division takes a pass of its own.
    """

    def update(grads, state, params=None):
        del params
        scale = max_norm / jnp.maximum(optax.global_norm(grads), max_norm)
        return jax.tree.map(lambda g: scale * g, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class AdamState(NamedTuple):
    count: jax.Array
    mean: optax.Updates
    square: optax.Updates


def scale_by_adam(beta1: float, beta2: float, epsilon: float, bias_correction: bool) -> optax.GradientTransformation:
    """Adam's update. Google's optimizer has no bias correction; optax's Adam cannot turn it off."""

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
    """Marks kernels and embeddings, which are decayed, True; biases and LayerNorm False."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def scale_by_trust_ratio() -> optax.GradientTransformation:
    """LAMB's trust ratio (You et al. 2020, algorithm 2): scales the update of each matrix to the norm of the matrix.

    Treats each layer, and each of query, key and value, as a matrix of its own, although they are stacked in one
    array. Leaves biases and LayerNorm unscaled, as in the authors' code.
    """

    def norms(path, x):
        """Returns the norm of each matrix stacked in `x`, in a shape that broadcasts against it."""
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
    """Makes the optimizer of `config.optimizer`; its `update` also takes `learning_rate`."""
    return optax.chain(
        clip_by_global_norm(config.max_grad_norm),
        scale_by_adam(config.beta1, config.beta2, config.epsilon, config.bias_correction),
        optax.add_decayed_weights(config.weight_decay, matrices),
        *([scale_by_trust_ratio()] if config.name == "lamb" else []),
        scale_by_given_learning_rate(),
    )
