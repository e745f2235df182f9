"""Self-attention without a Pallas kernel, in tiles of rows and heads, with a gradient that stores no scores."""

import abc
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute
from bertjax.nn.ops.dropout import dropout
from bertjax.nn.ops.matmul import multiply
from bertjax.nn.ops.tiles import Tile, each_tile


class AttentionLayout(abc.ABC):
    """The arrangement of queries and keys in matrix products. Instances compare by value.

    By default a query meets all keys of its row.
    """

    @abc.abstractmethod
    def visible(self, segments: Array) -> Array:
        """Returns the attention mask `[batch, 1, ..., queries, keys]` of segments `[batch, length]`."""

    def by_head(self, x: Array) -> Array:
        """Returns `[batch, length, heads, size]` as `[batch, heads, ..., queries, size]`."""
        return jnp.swapaxes(x, 1, 2)

    def by_token(self, x: Array) -> Array:
        """Returns `[batch, heads, ..., queries, size]` as `[batch, length, heads, size]`."""
        return jnp.swapaxes(x, 1, 2)

    def keys_of(self, x: Array) -> Array:
        """Returns the keys or values that the queries meet: `[..., queries, size]` -> `[..., keys, size]`."""
        return x

    def sum_keys(self, x: Array) -> Array:
        """Returns the transpose of `keys_of`: `[..., keys, size]` -> `[..., queries, size]`."""
        return x


class Settings(NamedTuple):
    """The settings of `attend_in_layout`.

    Attributes:
      rate: the dropout rate of the probabilities.
      compute: the dtypes.
      layout: the arrangement of queries and keys.
      tile: the rows and heads that are computed at a time, which divide batch and heads; None: everything at once.
      soft_cap: scores are capped smoothly, `soft_cap * tanh(scores / soft_cap)`, before the bias is added (Gemma 2);
        None: no cap.
    """

    rate: float
    compute: Compute
    layout: AttentionLayout
    tile: Tile | None
    soft_cap: float | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_in_layout(
    query_key_value: Array, segments: Array, dropout_keys: Array | None, bias: Array | None, settings: Settings
) -> Array:
    """Returns the context `[batch, length, heads, size]` of queries, keys, values `[batch, length, 3, heads, size]`.

    Args:
      query_key_value: the queries, keys and values.
      segments: `[batch, length]`.
      dropout_keys: `[batch]`; None: no dropout.
      bias: a term of the scores of all rows, float32 `[heads, queries, keys]`, for a layout in which a query meets all
        keys of its row; None: no term.
      settings: the settings.
    """
    return _attend_forward(query_key_value, segments, dropout_keys, bias, settings)[0]


def _attend_forward(
    query_key_value: Array, segments: Array, dropout_keys: Array | None, bias: Array | None, settings: Settings
) -> tuple[Array, Any]:
    rate, compute, layout, tile, soft_cap = settings

    def forward(query_key_value: Array, by_row: Any, first_head: Any) -> tuple[Array, Array]:
        mask, dropout_keys = by_row
        query, key, value = _by_head(query_key_value, layout)
        products = _capped(_products(query, layout.keys_of(key), compute), soft_cap)
        scores = _masked(products, mask, _of_heads(bias, first_head, query))
        largest = scores.max(-1, keepdims=True)
        exponentials = jnp.exp(scores - largest)
        sums = exponentials.sum(-1, keepdims=True)
        start = first_head * query.shape[2] ** 2
        exponentials = dropout(exponentials.astype(compute.dtype), rate, dropout_keys, start)
        # Softmax is normalized after the product with the values, which is smaller than the scores.
        context = multiply(exponentials, layout.keys_of(value), compute, dtype=jnp.float32) / sums
        log_sums = (largest + jnp.log(sums))[..., 0]
        return layout.by_token(context).astype(compute.dtype), log_sums.reshape(*log_sums.shape[:2], -1)

    batch, length, _, heads, size = query_key_value.shape
    context_shape = jax.ShapeDtypeStruct((batch, length, heads, size), query_key_value.dtype)
    log_sums_shape = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    by_row = layout.visible(segments), dropout_keys
    context, log_sums = each_tile(forward, query_key_value, by_row, (context_shape, log_sums_shape), tile)
    return context, (query_key_value, segments, dropout_keys, bias, log_sums, context)


def _attend_backward(settings: Settings, saved: Any, grad: Array) -> tuple[Array, None, None, Array | None]:
    rate, compute, layout, tile, soft_cap = settings

    def backward(by_head: Any, by_row: Any, first_head: Any) -> tuple[Array, Array | None]:
        """Recomputes scores and dropout, because they would take most of the memory."""
        query_key_value, log_sums, mean, grad = by_head
        mask, dropout_keys = by_row
        query, key, value = _by_head(query_key_value, layout)
        keys, values, grad = layout.keys_of(key), layout.keys_of(value), layout.by_head(grad)
        log_sums, mean = (x.reshape(*query.shape[:-1], 1) for x in (log_sums, mean))
        products = _capped(_products(query, keys, compute), soft_cap)
        probs = jnp.exp(_masked(products, mask, _of_heads(bias, first_head, query)) - log_sums)

        start = first_head * query.shape[2] ** 2
        kept_probs = dropout(probs.astype(compute.dtype), rate, dropout_keys, start)
        grad_values = multiply(kept_probs, grad, compute, transpose_a=True)
        grad_probs = multiply(grad, values, compute, transpose_b=True, dtype=jnp.float32)
        grad_probs = dropout(grad_probs, rate, dropout_keys, start)
        grad_scores = probs * (grad_probs - mean)
        grad_bias = None if bias is None else jnp.swapaxes(grad_scores.sum(0, keepdims=True), 1, 2)
        if soft_cap is not None:  # the derivative of the cap
            grad_scores = grad_scores * (1 - jnp.square(products / soft_cap))
        grad_scores = grad_scores / math.sqrt(query.shape[-1])
        grad_query = multiply(grad_scores, keys, compute)
        grad_keys = multiply(grad_scores, query, compute, transpose_a=True)
        grads = grad_query, layout.sum_keys(grad_keys), layout.sum_keys(grad_values)
        return jnp.stack([layout.by_token(x) for x in grads], axis=2).astype(query_key_value.dtype), grad_bias

    query_key_value, segments, dropout_keys, bias, log_sums, context = saved
    # The gradient of softmax subtracts the sum over keys of probs * grad_probs. This product has the same value.
    mean = jnp.einsum("bqhd,bqhd->bqh", grad, context, precision="highest", preferred_element_type=jnp.float32)
    by_head = query_key_value, log_sums, jnp.swapaxes(mean, 1, 2), grad
    by_row = layout.visible(segments), dropout_keys
    heads_second = None if bias is None else jnp.swapaxes(bias[None], 1, 2)  # the axes of `each_tile`
    grads, grad_bias = each_tile(backward, by_head, by_row, (query_key_value, heads_second), tile)
    return grads, None, None, None if grad_bias is None else jnp.swapaxes(grad_bias, 1, 2)[0]


attend_in_layout.defvjp(_attend_forward, _attend_backward)


def _by_head(query_key_value: Array, layout: AttentionLayout) -> Iterator[Array]:
    query, key, value = jnp.moveaxis(query_key_value, 2, 0)
    query = nn.with_logical_constraint(query, ("batch", "length", "heads", "kv"))
    return (layout.by_head(x) for x in (query, key, value))


def _of_heads(bias: Array | None, first: Any, query: Array) -> Array | None:
    """Returns the part of a bias `[heads, queries, keys]` for the heads of `query`, which begin at `first`."""
    return None if bias is None else jax.lax.dynamic_slice_in_dim(bias, first, query.shape[1])


def _products(query: Array, keys: Array, compute: Compute) -> Array:
    """Queries and keys `[..., size]` -> products over the root of the size, float32 `[..., queries, keys]`."""
    return multiply(query, keys, compute, transpose_b=True, dtype=jnp.float32) / math.sqrt(query.shape[-1])


def _capped(scores: Array, soft_cap: float | None) -> Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _masked(scores: Array, mask: Array, bias: Array | None) -> Array:
    """Returns the scores plus a bias, and the lowest number where the mask is False."""
    scores = scores if bias is None else scores + bias
    return jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
