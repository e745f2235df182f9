"""Attention whose scores depend on the distance from a query to a key (Transformer-XL; Dai et al. 2019, section 3.3).

The score of the query i and the key j is (q_i + u) k_j + (q_i + v) r over the root of the head size. r is projected
from sinusoids of the distance i - j, and u and v are learned. XLNet adds (q_i + s) e. There are two vectors e, for keys
in the segment of the query and for keys in another segment (Yang et al. 2019, section 2.5).
"""

import math
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.nn.dense import Dense, partitioned
from bertjax.nn.ops.dropout import dropout
from bertjax.nn.ops.plain_attention import KeyValueCache


class Read(NamedTuple):
    """The keys, values and positions that queries attend to."""

    keys: Array  # [batch, keys, heads, size]
    values: Array  # [batch, keys, heads, size]
    positions: Array  # [distances, heads, size], projected

    def joined(self, cache: KeyValueCache, start: Array) -> tuple["Read", KeyValueCache]:
        """Returns the keys and values of a cache with these tokens at `start`, and the next cache."""
        place = (0, start, 0, 0)
        cache = KeyValueCache(*(jax.lax.dynamic_update_slice(old, new, place) for old, new in zip(cache, self[:2])))
        return Read(*cache, self.positions), cache


class Biases(NamedTuple):
    """The vectors u and v, which are added to queries for the product with keys and with positions: `[heads, size]`."""

    content: Array
    position: Array


class SegmentTerm(NamedTuple):
    """The term of XLNet's scores that depends on segments."""

    bias: Array  # [heads, size]
    embedding: Array  # [2, heads, size]: for keys in the segment of the query, and in another segment
    is_same: Array  # [batch, queries, keys] booleans


def distances(queries: int, keys: int, is_causal: bool) -> Array:
    """Returns the distances from the last `queries` tokens to all `keys` tokens, from the largest to the smallest.

    Earlier tokens have positive distances. With `is_causal` there are no negative distances.
    """
    return jnp.arange(keys - 1, -1 if is_causal else -queries, -1)


def distance_embeddings(distances: Array, size: int) -> Array:
    """Returns sines, and then cosines, of distances `[distances]` in `size / 2` wave lengths: `[distances, size]`.

    Sines and cosines do not alternate, as in the code of both papers. In `positions.sinusoids` they alternate.
    """
    angles = distances[:, None] * 10_000.0 ** (-jnp.arange(0, size, 2) / size)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[:, :size]


def shift(scores: Array, keys: int) -> Array:
    """Converts scores by distance to scores by key: `[..., queries, distances]` -> `[..., queries, keys]`.

    The query i has the `keys` scores that begin at index `queries - 1 - i`: in memory, each row begins one element
    earlier than the previous row. The scores of keys without a distance have no meaning.
    """
    *batch, queries, count = scores.shape
    flat = jnp.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(0, 1)]).reshape(*batch, -1)
    moved = jax.lax.slice_in_dim(flat, queries - 1, queries - 1 + queries * count, axis=-1)
    return moved.reshape(*batch, queries, count)[..., :keys]


def shift_to(scores: Array, keys: int, places: Array) -> Array:
    """As `shift`, `[batch, queries, heads, distances]` -> `[batch, queries, heads, keys]`, for queries at any places.

    Shifts the scores of a query by its offset, decomposed into powers of two. A TPU does this at the speed of its
    memory, and would read slices with any offset one by one.

    Args:
      scores: the scores by distance.
      keys: the number of keys.
      places: `[batch, queries]`, the positions of the queries among the keys.
    """
    offsets = (keys - 1 - places)[..., None, None]
    steps = [1 << bit for bit in reversed(range((scores.shape[-1] - keys).bit_length()))]
    room = keys + sum(steps)
    scores = jnp.pad(scores, [(0, 0)] * 3 + [(0, max(0, room - scores.shape[-1]))])
    for step in steps:
        room -= step
        scores = jnp.where(offsets & step, scores[..., step : step + room], scores[..., :room])
    return scores


def attend_relative(
    query: Array,
    read: Read,
    biases: Biases,
    mask: Array,
    rate: float,
    compute: Compute,
    dropout_keys: Array | None = None,
    segments: SegmentTerm | None = None,
    places: Array | None = None,
) -> Array:
    """Returns the context `[batch, queries, heads, size]`.

    The backward pass recomputes the scores `[batch, heads, queries, keys]`, which would take most of the memory.

    Args:
      query: the queries `[batch, queries, heads, size]`.
      read: the keys, values and positions.
      biases: the biases of the queries.
      mask: booleans `[batch or 1, 1, queries, keys]`. A query without visible keys attends to all keys equally.
      rate: the dropout rate of the probabilities.
      compute: the dtypes.
      dropout_keys: `[batch]`; None: no dropout of probabilities.
      segments: the term for segments; None: no such term.
      places: `[batch, queries]`, the positions of the queries among the keys; None: the last positions.
    """
    attend = jax.checkpoint(_attend, static_argnums=(4, 5), prevent_cse=compute.unroll)
    return attend(query, read, biases, mask, rate, compute, dropout_keys, segments, places)


def _attend(
    query: Array, read: Read, biases: Biases, mask: Array, rate: float, compute: Compute, *options: Any
) -> Array:
    dropout_keys, segments, places = options
    dtype: str = compute.dtype
    product: dict[str, Any] = dict(preferred_element_type=jnp.float32)

    def biased(bias: Array) -> Array:
        return query + bias.astype(dtype)

    scores = jnp.einsum("bqhd,bkhd->bhqk", biased(biases.content), read.keys, **product)
    if places is None:
        by_distance = jnp.einsum("bqhd,rhd->bhqr", biased(biases.position), read.positions, **product)
        scores += shift(by_distance, read.keys.shape[1])
    else:
        by_distance = jnp.einsum("bqhd,rhd->bqhr", biased(biases.position), read.positions, **product)
        scores += jnp.swapaxes(shift_to(by_distance, read.keys.shape[1], places), 1, 2)
    if segments is not None:
        by_segment = jnp.einsum("bqhd,shd->sbhq", biased(segments.bias), segments.embedding.astype(dtype), **product)
        same, different = by_segment[..., None]
        scores += jnp.where(segments.is_same[:, None], same, different)
    scores = jnp.where(mask, scores / math.sqrt(query.shape[-1]), jnp.finfo(jnp.float32).min)
    probs = dropout(nn.softmax(scores).astype(dtype), rate, dropout_keys)
    return jnp.einsum("bhqk,bkhd->bqhd", probs, read.values).astype(dtype)


class RelativeBiases(nn.Module):
    """The biases u and v of a layer, or of all layers."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> Biases:
        """Returns the biases."""
        shape = self.config.num_attention_heads, self.config.head_size
        init = partitioned(nn.initializers.truncated_normal(self.config.initializer_range), ("heads", "kv"))
        return Biases(*(self.param(name, init, shape) for name in Biases._fields))


class RelativeAttention(nn.Module):
    """Multi-head attention with relative positions, and with projections without biases.

    `read` returns the keys and values of tokens. The queries of one or more streams of hidden states attend to them.
    """

    config: ModelConfig
    compute: Compute

    def setup(self) -> None:
        """Builds the projections."""
        config, hidden = self.config, (self.config.hidden_size,)
        by_head, axes = (config.num_attention_heads, config.head_size), ("embed", "heads", "kv")

        def dense(inputs: tuple[int, ...], features: tuple[int, ...], axes: tuple[str, ...]) -> Dense:
            return Dense(config, self.compute, inputs, features, axes, use_bias=False)

        self.query = dense(hidden, by_head, axes)
        self.key_value = dense(hidden, (2, *by_head), ("embed", "projections", "heads", "kv"))
        self.position = dense(hidden, by_head, axes)
        self.output = dense(by_head, hidden, ("heads", "kv", "embed"))

    def read(self, x: Array, embedded: Array, keys: Array | None = None) -> Read:
        """Returns the keys, values and positions of x `[batch, keys, hidden]`. The queries are the last tokens of x.

        Args:
          x: hidden states.
          embedded: the `distance_embeddings` of `distances`.
          keys: `[batch]`, for the dropout of low-rank updates; None: no dropout.
        """
        key, value = jnp.moveaxis(self.key_value(x, keys), 2, 0)
        return Read(key, value, self.position(embedded[None].astype(x.dtype))[0])

    def __call__(
        self,
        x: Array,
        read: Read,
        biases: Biases,
        mask: Array,
        keys: Array | None = None,
        segments: SegmentTerm | None = None,
        places: Array | None = None,
    ) -> Array:
        """Returns the projected context `[batch, queries, hidden]`.

        Args:
          x: the hidden states of the queries, `[batch, queries, hidden]`.
          read: see `attend_relative`.
          biases: see `attend_relative`.
          mask: booleans `[batch or 1, 1, queries, keys]`.
          keys: `[batch]`, for dropout; None: no dropout.
          segments: see `attend_relative`.
          places: see `attend_relative`.
        """
        query = nn.with_logical_constraint(self.query(x, keys), ("batch", "length", "heads", "kv"))
        rate = cast(Any, self.config).attention_probs_dropout_prob
        context = attend_relative(query, read, biases, mask, rate, self.compute, keys, segments, places)
        return self.output(context.reshape(*context.shape[:2], -1), keys)


def probabilities(query: Array, read: Read, biases: Biases, mask: Array, segments: SegmentTerm | None = None) -> Array:
    """Returns attention probabilities in float32, `[batch, heads, queries, keys]`; see `attend_relative`."""
    one_hot = jnp.eye(read.keys.shape[1])[None, :, None, :]
    one_hot = jnp.broadcast_to(one_hot, (*read.keys.shape[:3], read.keys.shape[1]))
    of_queries = attend_relative(query, read._replace(values=one_hot), biases, mask, 0.0, Compute(), segments=segments)
    return jnp.swapaxes(of_queries, 1, 2)


def layer_probabilities(
    config: ModelConfig,
    layers: dict,
    inputs: Array,
    apart: Array,
    mask: Array,
    shared_biases: dict | None = None,
    is_same: Array | None = None,
) -> Array:
    """Returns the attention probabilities of all layers for a text, `[layers, heads, queries, keys]`.

    Args:
      config: the model config.
      layers: the stacked params of the layers.
      inputs: the inputs of the layers `[layers, 1, length, hidden]`.
      apart: the `distances` of the keys.
      mask: `[1, 1, queries, keys]` booleans.
      shared_biases: the params of `RelativeBiases` that all layers share; None: each layer has biases.
      is_same: booleans `[1, queries, keys]` of `SegmentTerm`; None: no such term.
    """
    embedded, attention = distance_embeddings(apart, config.hidden_size), RelativeAttention(config, Compute())

    def of_layer(layer: dict, x: Array) -> Array:
        bound = attention.bind({"params": layer["attention"]})
        biases = Biases(**(layer["biases"] if shared_biases is None else shared_biases))
        term = None if is_same is None else SegmentTerm(layer["segment_bias"], layer["segment_embedding"], is_same)
        return probabilities(bound.query(x), bound.read(x, embedded), biases, mask, term)[0]

    return jax.lax.map(lambda layer_and_x: of_layer(*layer_and_x), (layers, inputs))
