"""Self-attention within a window: each token sees those at most so many places away, in its segment.

Its cost grows with length x window. Queries are divided into blocks of the window's half; those of a block see keys of
their own block and of its two neighbours, and of these the ones that are near enough. The gradient stores no scores.
"""

import functools
import math

import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.nn.ops.matmul import multiply
from bertjax.nn.ops.tiles import Tile, each_tile


def window_attention(query_key_value, segments, half: int, compute: Compute, tile: Tile | None = None):
    """Queries, keys, values `[batch, length, 3, heads, size]` -> `[batch, length, heads * size]`.

    Args:
      segments: `[batch, length]`; tokens see their own segment only, whose tokens lie side by side.
      half: how many places away a token sees, to either side.
      tile: what to compute at a time, else everything; it divides batch and heads.
    """
    length = segments.shape[1]
    missing = -length % half  # padding, in a segment of its own
    padded = jnp.pad(query_key_value, [(0, 0), (0, missing), (0, 0), (0, 0), (0, 0)])
    segments = jnp.pad(segments, [(0, 0), (0, missing)], constant_values=-1)
    context = _attend(padded, segments, half, compute, tile)[:, :length]
    return context.reshape(*context.shape[:2], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _attend(query_key_value, segments, half: int, compute: Compute, tile: Tile | None):
    return _attend_forward(query_key_value, segments, half, compute, tile)[0]


def _attend_forward(query_key_value, segments, half, compute, tile):
    def forward(query_key_value, mask, first_head):
        del first_head
        return _forward(query_key_value, mask, half, compute)

    batch, length, _, heads, size = query_key_value.shape
    context = jax.ShapeDtypeStruct((batch, length, heads, size), query_key_value.dtype)
    log_sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    context, log_sums = each_tile(forward, query_key_value, _visible(segments, half), (context, log_sums), tile)
    return context, (query_key_value, segments, log_sums, context)


def _forward(query_key_value, mask, half, compute):
    """Returns the context `[batch, length, heads, size]` and the logarithms of softmax's sums `[batch, heads, length]`.

    Softmax is normalized after the product with the values, which is smaller than the scores.
    """
    query, key, value = _blocks_by_head(query_key_value, half)
    scores = _scores(query, _with_neighbours(key), mask, compute)
    most = scores.max(-1, keepdims=True)
    exponentials = jnp.exp(scores - most)
    sums = exponentials.sum(-1, keepdims=True)
    values = _with_neighbours(value)
    context = multiply(exponentials.astype(compute.dtype), values, compute, dtype=jnp.float32) / sums
    log_sums = (most + jnp.log(sums))[..., 0]
    return _by_token(context).astype(compute.dtype), log_sums.reshape(*log_sums.shape[:2], -1)


def _attend_backward(half, compute, tile, saved, grad):
    query_key_value, segments, log_sums, context = saved
    # Softmax's gradient subtracts the sum over keys of probs * grad_probs, which is this product.
    mean = jnp.einsum("bqhd,bqhd->bhq", grad, context, precision="highest", preferred_element_type=jnp.float32)

    def backward(by_head, mask, first_head):
        del first_head
        return _backward(*by_head, mask, half, compute)

    # Those that are per head and token get the form of the others.
    by_head = query_key_value, _with_size(log_sums), _with_size(mean), grad
    grads = each_tile(backward, by_head, _visible(segments, half), query_key_value, tile)
    return grads, None


def _backward(query_key_value, log_sums, mean, grad, mask, half, compute):
    """Returns the gradient of `query_key_value`. Recomputes the scores, which would be most of the memory."""
    query, key, value = _blocks_by_head(query_key_value, half)
    (grad,) = _blocks_by_head(grad[:, :, None], half)
    log_sums, mean = (_blocks_by_head(x[:, :, None], half)[0] for x in (log_sums, mean))
    keys, values = _with_neighbours(key), _with_neighbours(value)
    probs = jnp.exp(_scores(query, keys, mask, compute) - log_sums)
    grad_values = multiply(probs.astype(compute.dtype), grad, compute, transpose_a=True)
    grad_probs = multiply(grad, values, compute, transpose_b=True, dtype=jnp.float32)
    grad_scores = probs * (grad_probs - mean) / math.sqrt(query.shape[-1])
    grad_query = multiply(grad_scores, keys, compute)
    grad_keys = multiply(grad_scores, query, compute, transpose_a=True)
    each = (grad_query, _sum_of_neighbours(grad_keys), _sum_of_neighbours(grad_values))
    return jnp.stack([_by_token(x) for x in each], axis=2).astype(query_key_value.dtype)


_attend.defvjp(_attend_forward, _attend_backward)


def _with_size(x):
    """`[batch, heads, length]` -> `[batch, length, heads, 1]`."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def _blocks_by_head(x, half: int):
    """`[batch, length, n, heads, size]` -> n arrays `[batch, heads, blocks, half, size]`."""
    batch, length, _, heads, size = x.shape
    x = x.reshape(batch, length // half, half, -1, heads, size)
    return [jnp.moveaxis(each, 3, 1) for each in jnp.moveaxis(x, 3, 0)]


def _by_token(x):
    """`[batch, heads, blocks, half, size]` -> `[batch, length, heads, size]`."""
    x = jnp.moveaxis(x, 1, 3)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _with_neighbours(x):
    """Blocks -> themselves between the ones before and after: `[..., blocks, 3 * half, size]`; zeros at the ends."""
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(1, 1), (0, 0), (0, 0)])
    return jnp.concatenate([padded[..., :-2, :, :], x, padded[..., 2:, :, :]], axis=-2)


def _sum_of_neighbours(x):
    """The transpose of `_with_neighbours`: `[..., blocks, 3 * half, size]` -> `[..., blocks, half, size]`."""
    before, own, after = jnp.split(x, 3, axis=-2)
    ends = [(0, 0)] * (x.ndim - 3)
    from_next = jnp.pad(before[..., 1:, :, :], [*ends, (0, 1), (0, 0), (0, 0)])
    from_last = jnp.pad(after[..., :-1, :, :], [*ends, (1, 0), (0, 0), (0, 0)])
    return own + from_next + from_last


def _scores(query, keys, mask, compute):
    """`[batch, heads, blocks, half, size]`, `[..., 3 * half, size]` -> `[..., half, 3 * half]`, in float32."""
    scores = multiply(query, keys, compute, transpose_b=True, dtype=jnp.float32) / math.sqrt(query.shape[-1])
    return jnp.where(mask, scores, jnp.finfo(jnp.float32).min)


def _visible(segments: jax.Array, half: int) -> jax.Array:
    """Attention mask: `[batch, length]` segments -> `[batch, 1, blocks, half, 3 * half]` booleans.

    Padding sees padding, so that no row of the softmax is empty; no other token does.
    """
    own = segments.reshape(segments.shape[0], -1, half)
    near = jnp.pad(own, [(0, 0), (1, 1), (0, 0)], constant_values=-2)
    near = jnp.concatenate([near[:, :-2], own, near[:, 2:]], axis=-1)
    distance = jnp.arange(3 * half) - half - jnp.arange(half)[:, None]
    return ((own[..., None] == near[:, :, None]) & (jnp.abs(distance) <= half))[:, None]
