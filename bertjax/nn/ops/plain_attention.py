"""Self-attention without a Pallas kernel, in which a query meets all keys of its row; attention with a cache."""

import dataclasses
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute
from bertjax.nn.ops.dropout import dropout
from bertjax.nn.ops.tiled_attention import AttentionLayout, Settings, attend_in_layout
from bertjax.nn.ops.tiles import Tile


@dataclasses.dataclass(frozen=True)
class WholeRows(AttentionLayout):
    """The layout in which a query meets all keys of its row."""

    causal: bool
    window: int | None

    def visible(self, segments: Array) -> Array:
        """Returns the mask `[batch, 1, queries, keys]`."""
        return visible(segments, self.causal, self.window)


def plain_attention(
    query_key_value: Array,
    segments: Array,
    dropout_keys: Array | None,
    rate: float,
    compute: Compute,
    causal: bool = False,
    tile: Tile | None = None,
    window: int | None = None,
    bias: Array | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Queries, keys, values `[batch, length, 3, heads, size]` -> `[batch, length, heads * size]`, within segments.

    Args:
      query_key_value: the queries, keys and values.
      segments: `[batch, length]`.
      dropout_keys: `[batch]`; None: no dropout.
      rate: the dropout rate of the probabilities.
      compute: the dtypes.
      causal: tokens attend to earlier tokens and to themselves.
      tile: see `tiled_attention.Settings`.
      window: tokens attend to tokens at most this number of places away (for long texts see `window_attention`).
      bias: see `attend_in_layout`.
      soft_cap: see `tiled_attention.Settings`.
    """
    rate = 0.0 if dropout_keys is None else rate
    settings = Settings(rate, compute, WholeRows(causal, window), tile, soft_cap)
    context = attend_in_layout(query_key_value, segments, dropout_keys, bias, settings)
    return context.reshape(*context.shape[:2], -1)


def masked_attention(
    query_key_value: Array,
    mask: Array,
    bias: Array | None,
    dropout_keys: Array | None,
    rate: float,
    compute: Compute,
    soft_cap: float | None = None,
) -> Array:
    """Queries, keys, values `[batch, length, 3, heads, size]` -> `[batch, length, heads * size]`, with a mask.

    The backward pass recomputes the scores.

    Args:
      query_key_value: the queries, keys and values.
      mask: booleans `[batch, length, keys]`, the tokens that each token attends to. The keys are the first tokens.
      bias: a term of the scores, float32 `[batch, heads, length, keys]` or `[heads, length, keys]`; None: no term.
      dropout_keys: `[batch]`; None: no dropout.
      rate: the dropout rate of the probabilities.
      compute: the dtypes.
      soft_cap: see `tiled_attention.Settings`.
    """
    attend = jax.checkpoint(_masked_attention, static_argnums=(4, 5, 6), prevent_cse=compute.unroll)
    return attend(query_key_value, mask, bias, dropout_keys, rate, compute, soft_cap)


def _masked_attention(
    query_key_value: Array,
    mask: Array,
    bias: Array | None,
    dropout_keys: Array | None,
    rate: float,
    compute: Compute,
    soft_cap: float | None,
) -> Array:
    query, key, value = jnp.moveaxis(query_key_value, 2, 0)
    key, value = key[:, : mask.shape[-1]], value[:, : mask.shape[-1]]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(query.shape[-1])
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = scores if bias is None else scores + bias
    scores = jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min)
    probs = dropout(nn.softmax(scores).astype(compute.dtype), rate, dropout_keys)
    context = jnp.einsum("bhqk,bkhd->bqhd", probs, value).astype(compute.dtype)
    return context.reshape(*context.shape[:2], -1)


class KeyValueCache(NamedTuple):
    """The keys and values of earlier tokens, `[batch, longest, heads, size]`, of one layer or stacked on `[layers]`."""

    keys: Array
    values: Array


def cached_attention(query_key_value: Array, positions: Array, cache: KeyValueCache) -> tuple[Array, KeyValueCache]:
    """Attends from tokens to earlier tokens, in the cache, and to themselves, without dropout.

    Args:
      query_key_value: `[batch, length, 3, heads, size]`.
      positions: `[length]`, consecutive; the cache contains all earlier positions.
      cache: the cache.

    Returns:
      The context `[batch, length, heads * size]`, and the cache with these tokens.
    """
    query, key, value = jnp.moveaxis(query_key_value, 2, 0)
    start = (0, positions[0], 0, 0)
    cache = KeyValueCache(*(jax.lax.dynamic_update_slice(old, new, start) for old, new in zip(cache, (key, value))))
    is_before = jnp.arange(cache.keys.shape[1]) <= positions[:, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, cache.keys, preferred_element_type=jnp.float32)
    scores = jnp.where(is_before, scores / math.sqrt(query.shape[-1]), jnp.finfo(jnp.float32).min)
    probs = nn.softmax(scores).astype(query.dtype)
    context = jnp.einsum("bhqk,bkhd->bqhd", probs, cache.values)
    return context.reshape(*context.shape[:2], -1), cache


def visible(segments: Array, causal: bool = False, window: int | None = None) -> Array:
    """Returns the attention mask of segments `[batch, length]`: booleans `[batch, 1, queries, keys]`.

    Segment 0 is padding. Padding attends to padding, so that no row of the softmax is empty. No other token attends to
    padding.
    """
    mask, length = (segments[:, :, None] == segments[:, None, :])[:, None], segments.shape[1]
    if causal:
        mask &= jnp.tri(length, dtype=bool)
    if window is not None and not (isinstance(length, int) and length <= window + 1):
        mask &= jnp.abs(jnp.arange(length) - jnp.arange(length)[:, None]) <= window
    return mask
