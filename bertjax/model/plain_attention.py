"""Self-attention without a kernel of our own: the compiler's products, with a gradient that stores no scores."""

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.dropout import dropout


def plain_attention(query_key_value, segments, dropout_keys, rate: float, causal: bool = False):
    """Queries, keys, values `[batch, length, 3, heads, size]` -> `[batch, length, heads * size]`, within segments.

    `causal`: tokens attend to themselves and to earlier ones only.
    """
    context = _attend(query_key_value, segments, dropout_keys, 0.0 if dropout_keys is None else rate, causal)
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
    probs = nn.softmax(_scores(query, cache.keys, is_before)).astype(query.dtype)
    context = jnp.einsum("bhqk,bkhd->bqhd", probs, cache.values)
    return context.reshape(*context.shape[:2], -1), cache


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(query_key_value, segments, dropout_keys, rate: float, causal: bool):
    return _attend_forward(query_key_value, segments, dropout_keys, rate, causal)[0]


def _attend_forward(query_key_value, segments, dropout_keys, rate, causal):
    """Softmax is normalized after the product with the values, which is smaller than the scores."""
    query, key, value = _constrained(query_key_value)
    scores = _scores(query, key, visible(segments, causal))
    most = scores.max(-1, keepdims=True)
    exponentials = jnp.exp(scores - most)
    sums = exponentials.sum(-1, keepdims=True)
    exponentials = dropout(exponentials.astype(query.dtype), rate, dropout_keys)
    context = jnp.einsum("bhqk,bkhd->bqhd", exponentials, value, preferred_element_type=jnp.float32)
    context = (context / jnp.swapaxes(sums, 1, 2)).astype(query.dtype)
    return context, (query_key_value, segments, dropout_keys, most + jnp.log(sums), context)


def _attend_backward(rate, causal, saved, grad):
    """Recomputes scores and dropout: they take less time than memory, of which they would be most."""
    query_key_value, segments, dropout_keys, log_sums, context = saved
    query, key, value = _constrained(query_key_value)
    dtype = query.dtype
    probs = jnp.exp(_scores(query, key, visible(segments, causal)) - log_sums)

    grad_value = jnp.einsum("bhqk,bqhd->bkhd", dropout(probs.astype(dtype), rate, dropout_keys), grad)
    grad_probs = jnp.einsum("bqhd,bkhd->bhqk", grad, value, preferred_element_type=jnp.float32)
    grad_probs = dropout(grad_probs, rate, dropout_keys)
    # Softmax's gradient subtracts the sum over keys of probs * grad_probs, which is this product.
    mean = jnp.einsum("bqhd,bqhd->bqh", grad, context, precision="highest", preferred_element_type=jnp.float32)
    mean = jnp.swapaxes(mean, 1, 2)[..., None]
    grad_scores = (probs * (grad_probs - mean) / math.sqrt(query.shape[-1])).astype(dtype)
    grad_query = jnp.einsum("bhqk,bkhd->bqhd", grad_scores, key)
    grad_key = jnp.einsum("bhqk,bqhd->bkhd", grad_scores, query)
    return jnp.stack([grad_query, grad_key, grad_value], axis=2), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _constrained(query_key_value):
    query, key, value = jnp.moveaxis(query_key_value, 2, 0)
    return nn.with_logical_constraint(query, ("batch", "length", "heads", "kv")), key, value


def _scores(query, key, mask):
    """`[batch, length, heads, size]`, twice, and a mask -> `[batch, heads, queries, keys]`, in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(query.shape[-1])
    return jnp.where(mask, scores, jnp.finfo(jnp.float32).min)


def visible(segments: jax.Array, causal: bool = False) -> jax.Array:
    """Attention mask: `[batch, length]` segments -> `[batch, 1, queries, keys]` booleans.

    Segment 0 is padding. Padding attends to padding, so that no row of the softmax is empty; no other token does.
    """
    mask = (segments[:, :, None] == segments[:, None, :])[:, None]
    return mask & jnp.tri(segments.shape[1], dtype=bool) if causal else mask
