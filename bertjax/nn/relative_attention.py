"""Attention whose scores depend on the distance from a query to a key (Transformer-XL; Dai et al. 2019, section 3.3).

The score of the query i and the key j is (q_i + u) k_j + (q_i + v) r over the root of a head's size, where r is
projected from sinusoids of the distance i - j, and u and v are learnt. XLNet adds (q_i + s) e, where e is one of two
vectors, for keys of the query's own segment and for those of another (Yang et al. 2019, section 2.5).
"""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.nn.attention import Dense
from bertjax.nn.ops.dropout import dropout
from bertjax.nn.ops.plain_attention import Cache


class Read(NamedTuple):
    """What queries read."""

    keys: jax.Array  # [batch, keys, heads, size]
    values: jax.Array  # [batch, keys, heads, size]
    positions: jax.Array  # [distances, heads, size], projected

    def joined(self, cache: Cache, start: jax.Array) -> tuple["Read", Cache]:
        """Returns what a cache has with these tokens, whose first place in it is `start`, and this cache."""
        place = (0, start, 0, 0)
        cache = Cache(*(jax.lax.dynamic_update_slice(old, new, place) for old, new in zip(cache, self[:2])))
        return Read(*cache, self.positions), cache


class Biases(NamedTuple):
    """What is added to queries before they meet keys, and before they meet positions: `[heads, size]`."""

    content: jax.Array
    position: jax.Array


class SegmentTerm(NamedTuple):
    """XLNet's part of scores that depends on segments."""

    bias: jax.Array  # [heads, size]
    embedding: jax.Array  # [2, heads, size]: for keys in the query's own segment, and in another
    is_same: jax.Array  # [batch, queries, keys] booleans


def distances(queries: int, keys: int, is_causal: bool) -> jax.Array:
    """Returns the distances from the last `queries` of some tokens to all `keys`, from the highest to the lowest.

    Those before a query are at positive distances. `is_causal`: there are no others.
    """
    return jnp.arange(keys - 1, -1 if is_causal else -queries, -1)


def distance_embeddings(distances: jax.Array, size: int) -> jax.Array:
    """Returns sines, and then cosines, of distances `[distances]` in `size / 2` wave lengths: `[distances, size]`.

    Unlike those of `encoder.sinusoids` they do not alternate, as in the code of both papers.
    """
    angles = distances[:, None] * 10_000.0 ** (-jnp.arange(0, size, 2) / size)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[:, :size]


def shift(scores: jax.Array, keys: int) -> jax.Array:
    """Moves scores of distances to the keys at these distances: `[..., queries, distances]` -> `[..., queries, keys]`.

    The distances of all queries are those of `distances`, of which the query i reads `keys`, from number
    `queries - 1 - i` on: in memory, a row is read one place earlier than the row before. Keys at a distance that is not
    there have scores without meaning.
    """
    *batch, queries, count = scores.shape
    flat = jnp.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(0, 1)]).reshape(*batch, -1)
    moved = jax.lax.slice_in_dim(flat, queries - 1, queries - 1 + queries * count, axis=-1)
    return moved.reshape(*batch, queries, count)[..., :keys]


def shift_to(scores: jax.Array, keys: int, places: jax.Array) -> jax.Array:
    """As `shift`, `[batch, queries, heads, distances]` -> `[batch, queries, heads, keys]`, of queries at any places.

    Moves them by powers of two, of which a query takes those that add up to its way: a TPU does that at the speed of
    its memory, and would read parts that begin anywhere one by one.

    Args:
      places: `[batch, queries]` theirs among the keys.
    """
    ways = (keys - 1 - places)[..., None, None]
    steps = [1 << bit for bit in reversed(range((scores.shape[-1] - keys).bit_length()))]
    room = keys + sum(steps)
    scores = jnp.pad(scores, [(0, 0)] * 3 + [(0, max(0, room - scores.shape[-1]))])
    for step in steps:
        room -= step
        scores = jnp.where(ways & step, scores[..., step : step + room], scores[..., :room])
    return scores


def attend(
    query: jax.Array,
    read: Read,
    biases: Biases,
    mask: jax.Array,
    rate: float,
    compute: Compute,
    dropout_keys: jax.Array | None = None,
    segments: SegmentTerm | None = None,
    places: jax.Array | None = None,
) -> jax.Array:
    """Returns what each query sees of the values, `[batch, queries, heads, size]`, as the query is.

    The backward pass computes scores again: they are most of what there is to store, `[batch, heads, queries, keys]`.

    Args:
      mask: `[batch or 1, 1, queries, keys]`: which keys a query sees. One that sees none sees the mean of all.
      dropout_keys: `[batch]`; None: no dropout of probabilities.
      places: `[batch, queries]` the places of the queries among the keys; None: they are the last ones.
    """
    attend = jax.checkpoint(_attend, static_argnums=(4, 5), prevent_cse=compute.unroll)
    return attend(query, read, biases, mask, rate, compute, dropout_keys, segments, places)


def _attend(query, read, biases, mask, rate, compute, dropout_keys, segments, places):
    dtype, product = compute.dtype, dict(preferred_element_type=jnp.float32)

    def of(bias):
        return query + bias.astype(dtype)

    scores = jnp.einsum("bqhd,bkhd->bhqk", of(biases.content), read.keys, **product)
    if places is None:
        by_distance = jnp.einsum("bqhd,rhd->bhqr", of(biases.position), read.positions, **product)
        scores += shift(by_distance, read.keys.shape[1])
    else:
        by_distance = jnp.einsum("bqhd,rhd->bqhr", of(biases.position), read.positions, **product)
        scores += jnp.swapaxes(shift_to(by_distance, read.keys.shape[1], places), 1, 2)
    if segments is not None:
        by_segment = jnp.einsum("bqhd,shd->sbhq", of(segments.bias), segments.embedding.astype(dtype), **product)
        own, other = by_segment[..., None]
        scores += jnp.where(segments.is_same[:, None], own, other)
    scores = jnp.where(mask, scores / math.sqrt(query.shape[-1]), jnp.finfo(jnp.float32).min)
    probs = dropout(nn.softmax(scores).astype(dtype), rate, dropout_keys)
    return jnp.einsum("bhqk,bkhd->bqhd", probs, read.values).astype(dtype)


class RelativeBiases(nn.Module):
    """The biases u and v, of a layer or of all."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> Biases:
        shape = self.config.num_attention_heads, self.config.head_size
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        init = nn.with_logical_partitioning(init, ("heads", "kv"))
        return Biases(*(self.param(name, init, shape) for name in Biases._fields))


class RelativeAttention(nn.Module):
    """Multi-head attention with relative positions, whose projections have no biases.

    `read` makes the keys and values of some tokens, to which the queries of one or more streams of states attend.
    """

    config: ModelConfig
    compute: Compute

    def setup(self):
        config, hidden = self.config, (self.config.hidden_size,)
        by_head, axes = (config.num_attention_heads, config.head_size), ("embed", "heads", "kv")

        def dense(inputs, features, axes):
            return Dense(config, self.compute, inputs, features, axes, use_bias=False)

        self.query = dense(hidden, by_head, axes)
        self.key_value = dense(hidden, (2, *by_head), ("embed", "projections", "heads", "kv"))
        self.position = dense(hidden, by_head, axes)
        self.output = dense(by_head, hidden, ("heads", "kv", "embed"))

    def read(self, x, embedded, keys=None) -> Read:
        """Returns what queries read of x `[batch, keys, hidden]`, of which those that are asked for are the last.

        `embedded`: the `distance_embeddings` of their `distances`. `keys` `[batch]`: for the dropout of low-rank
        updates.
        """
        key, value = jnp.moveaxis(self.key_value(x, keys), 2, 0)
        return Read(key, value, self.position(embedded[None].astype(x.dtype))[0])

    def __call__(
        self, x, read: Read, biases: Biases, mask, keys=None, segments: SegmentTerm | None = None, places=None
    ):
        """Returns what the queries of x see, projected: `[batch, queries, hidden]` -> the same.

        Args:
          mask: `[batch or 1, 1, queries, keys]` booleans.
          keys: `[batch]` for dropout; None: there is none.
          segments, places: see `attend`.
        """
        query = nn.with_logical_constraint(self.query(x, keys), ("batch", "length", "heads", "kv"))
        rate = self.config.attention_probs_dropout_prob
        context = attend(query, read, biases, mask, rate, self.compute, keys, segments, places)
        return self.output(context.reshape(*context.shape[:2], -1), keys)


def probabilities(
    query: jax.Array, read: Read, biases: Biases, mask: jax.Array, segments: SegmentTerm | None = None
) -> jax.Array:
    """Returns attention probabilities in float32, `[batch, heads, queries, keys]`; arguments as in `attend`."""
    one_hot = jnp.eye(read.keys.shape[1])[None, :, None, :]
    one_hot = jnp.broadcast_to(one_hot, (*read.keys.shape[:3], read.keys.shape[1]))
    of_queries = attend(query, read._replace(values=one_hot), biases, mask, 0.0, Compute(), segments=segments)
    return jnp.swapaxes(of_queries, 1, 2)


def layer_probabilities(
    config: ModelConfig,
    layers: dict,
    inputs: jax.Array,
    apart: jax.Array,
    mask: jax.Array,
    shared_biases: dict | None = None,
    is_same: jax.Array | None = None,
) -> jax.Array:
    """Returns the attention probabilities of all layers for one text, `[layers, heads, queries, keys]`.

    Args:
      config: the model config.
      layers: the stacked params of the layers.
      inputs: the inputs of the layers `[layers, 1, length, hidden]`.
      apart: the `distances` of the keys.
      mask: `[1, 1, queries, keys]` booleans.
      shared_biases: the params of `RelativeBiases` that all layers share; None: each layer has biases.
      is_same: booleans `[1, queries, keys]` of `SegmentTerm`; None: there is no such term.
    """
    embedded, attention = distance_embeddings(apart, config.hidden_size), RelativeAttention(config, Compute())

    def of_layer(layer: dict, x: jax.Array) -> jax.Array:
        bound = attention.bind({"params": layer["attention"]})
        biases = Biases(**(layer["biases"] if shared_biases is None else shared_biases))
        term = None if is_same is None else SegmentTerm(layer["segment_bias"], layer["segment_embedding"], is_same)
        return probabilities(bound.query(x), bound.read(x, embedded), biases, mask, term)[0]

    return jax.lax.map(lambda layer_and_x: of_layer(*layer_and_x), (layers, inputs))
