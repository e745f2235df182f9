"""Self-attention without a kernel of our own: the compiler's products, with a gradient that stores no scores."""

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.nn.ops.dropout import dropout
from bertjax.nn.ops.matmul import multiply
from bertjax.nn.ops.tiles import Tile, each_tile


def plain_attention(
    query_key_value,
    segments,
    dropout_keys,
    rate,
    compute: Compute,
    causal: bool = False,
    tile: Tile | None = None,
    window: int | None = None,
):
    """Queries, keys, values `[batch, length, 3, heads, size]` -> `[batch, length, heads * size]`, within segments.

    `causal`: tokens attend to themselves and to earlier ones only. `window`: only to those at most so many places away
    (for long texts see `window_attention`). `tile`: what to compute at a time, else everything; it divides batch and
    heads.
    """
    rate = 0.0 if dropout_keys is None else rate
    context = _attend(query_key_value, segments, dropout_keys, rate, compute, causal, tile, window)
    return context.reshape(*context.shape[:2], -1)


class Cache(NamedTuple):
    """The keys and values of earlier tokens, `[batch, longest, heads, size]`, of one layer or stacked on `[layers]`."""

    keys: jax.Array
    values: jax.Array


def cached_attention(query_key_value, positions, cache: Cache):
    """Attends from some tokens to themselves, to those before, and to those in the cache, without dropout.

    Args:
      query_key_value: `[batch, length, 3, heads, size]`.
      positions: `[length]`, one after the other; the cache has those before.

    Returns:
      The context `[batch, length, heads * size]`, and the cache with these tokens.
    """
    query, key, value = jnp.moveaxis(query_key_value, 2, 0)
    start = (0, positions[0], 0, 0)
    cache = Cache(*(jax.lax.dynamic_update_slice(old, new, start) for old, new in zip(cache, (key, value))))
    is_before = jnp.arange(cache.keys.shape[1]) <= positions[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, cache.keys, preferred_element_type=jnp.float32)
    scores = jnp.where(is_before, scores / math.sqrt(query.shape[-1]), jnp.finfo(jnp.float32).min)
    probs = nn.softmax(scores).astype(query.dtype)
    context = jnp.einsum("bhqk,bkhd->bqhd", probs, cache.values)
    return context.reshape(*context.shape[:2], -1), cache


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6, 7))
def _attend(query_key_value, segments, dropout_keys, rate: float, compute: Compute, causal: bool, tile, window):
    return _attend_forward(query_key_value, segments, dropout_keys, rate, compute, causal, tile, window)[0]


def _attend_forward(query_key_value, segments, dropout_keys, rate, compute, causal, tile, window):
    def forward(query_key_value, by_row, first_head):
        return _forward(query_key_value, *by_row, first_head, rate, compute)

    batch, length, _, heads, size = query_key_value.shape
    context = jax.ShapeDtypeStruct((batch, length, heads, size), query_key_value.dtype)
    log_sums = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    by_row = visible(segments, causal, window), dropout_keys
    context, log_sums = each_tile(forward, query_key_value, by_row, (context, log_sums), tile)
    return context, (query_key_value, segments, dropout_keys, log_sums, context)


def _forward(query_key_value, mask, dropout_keys, first_head, rate, compute):
    """Returns the context `[batch, length, heads, size]` and the logarithms of softmax's sums `[batch, heads, length]`.

    Softmax is normalized after the product with the values, which is smaller than the scores.
    """
    query, key, value = _by_head(query_key_value)
    scores = _scores(query, key, mask, compute)
    most = scores.max(-1, keepdims=True)
    exponentials = jnp.exp(scores - most)
    sums = exponentials.sum(-1, keepdims=True)
    start = first_head * query.shape[2] ** 2
    exponentials = dropout(exponentials.astype(compute.dtype), rate, dropout_keys, start)
    context = multiply(exponentials, value, compute, dtype=jnp.float32) / sums
    return jnp.swapaxes(context, 1, 2).astype(compute.dtype), (most + jnp.log(sums))[..., 0]


def _attend_backward(rate, compute, causal, tile, window, saved, grad):
    query_key_value, segments, dropout_keys, log_sums, context = saved
    # Softmax's gradient subtracts the sum over keys of probs * grad_probs, which is this product.
    mean = jnp.einsum("bqhd,bqhd->bqh", grad, context, precision="highest", preferred_element_type=jnp.float32)

    def backward(by_head, by_row, first_head):
        return _backward(*by_head, *by_row, first_head, rate, compute)

    by_head = query_key_value, log_sums, jnp.swapaxes(mean, 1, 2), grad
    by_row = visible(segments, causal, window), dropout_keys
    return each_tile(backward, by_head, by_row, query_key_value, tile), None, None


def _backward(query_key_value, log_sums, mean, grad, mask, dropout_keys, first_head, rate, compute):
    """Returns the gradient of `query_key_value`.

    Recomputes scores and dropout: they take less time than memory, of which they would be most.
    """
    query, key, value = _by_head(query_key_value)
    grad = jnp.swapaxes(grad, 1, 2)
    probs = jnp.exp(_scores(query, key, mask, compute) - log_sums[..., None])

    start = first_head * query.shape[2] ** 2
    kept_probs = dropout(probs.astype(compute.dtype), rate, dropout_keys, start)
    grad_value = multiply(kept_probs, grad, compute, transpose_a=True)
    grad_probs = multiply(grad, value, compute, transpose_b=True, dtype=jnp.float32)
    grad_probs = dropout(grad_probs, rate, dropout_keys, start)
    grad_scores = probs * (grad_probs - mean[..., None]) / math.sqrt(query.shape[-1])
    grad_query = multiply(grad_scores, key, compute)
    grad_key = multiply(grad_scores, query, compute, transpose_a=True)
    return jnp.stack([jnp.swapaxes(x, 1, 2) for x in (grad_query, grad_key, grad_value)], axis=2)


_attend.defvjp(_attend_forward, _attend_backward)


def _by_head(query_key_value):
    """`[batch, length, 3, heads, size]` -> queries, keys and values, each `[batch, heads, length, size]`."""
    query, key, value = jnp.moveaxis(query_key_value, 2, 0)
    query = nn.with_logical_constraint(query, ("batch", "length", "heads", "kv"))
    return (jnp.swapaxes(x, 1, 2) for x in (query, key, value))


def _scores(query, key, mask, compute):
    """Queries and keys `[batch, heads, length, size]`, and a mask -> `[batch, heads, queries, keys]`, in float32."""
    scores = multiply(query, key, compute, transpose_b=True, dtype=jnp.float32) / math.sqrt(query.shape[-1])
    return jnp.where(mask, scores, jnp.finfo(jnp.float32).min)


def visible(segments: jax.Array, causal: bool = False, window: int | None = None) -> jax.Array:
    """Attention mask: `[batch, length]` segments -> `[batch, 1, queries, keys]` booleans.

    Segment 0 is padding. Padding attends to padding, so that no row of the softmax is empty; no other token does.
    """
    mask, length = (segments[:, :, None] == segments[:, None, :])[:, None], segments.shape[1]
    if causal:
        mask &= jnp.tri(length, dtype=bool)
    if window is not None and not (isinstance(length, int) and length <= window + 1):
        mask &= jnp.abs(jnp.arange(length) - jnp.arange(length)[:, None]) <= window
    return mask
