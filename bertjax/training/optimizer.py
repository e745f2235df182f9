"""Adam with decoupled weight decay, as google-research/bert's optimization.py has it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


def learning_rate_schedule(peak: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Linear warm-up, then linear decay to 0. The decay counts from step 0 (optimization.create_optimizer), so the
    peak is never quite reached: just after warm-up the rate is `peak * (1 - warmup_steps / total_steps)`."""

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        decayed = peak * (1 - jnp.minimum(step, total_steps) / total_steps)
        return jnp.where(step < warmup_steps, peak * step / max(warmup_steps, 1), decayed)

    return schedule


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


def decays(params):
    """True where weight decay applies: kernels and embeddings, neither biases nor LayerNorm."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def make_optimizer(config, total_steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer of `config.optimizer`, and its learning rate by step."""
    schedule = learning_rate_schedule(config.learning_rate, config.warmup_steps, total_steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        scale_by_adam(config.beta1, config.beta2, config.epsilon, config.bias_correction),
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.scale_by_learning_rate(schedule),
    )
    return optimizer, schedule
