"""Disentangled attention (He et al. 2021, section 3.1): scores from contents and from relative positions.

The score of the query i and the key j is q_i k_j + q_i r_d + k_j s_d over the root of the head size times the number of
terms. r_d (c2p) and s_d (p2c) are projections of the embedding of the distance d = i - j.

Both terms depend on the distance only. The rows of r and s are therefore expanded to all distances of a text, the
products have the shape `[batch, heads, length, 2 length - 1]`, and `relative_attention.shift` moves the score of each
key to its place. On TPUs a kernel does this in one pass over memory. Without the kernel, the padding, the reshape and
the slice of `shift` take most of the time of a step on a TPU.
The code of the paper multiplies by the embeddings of buckets instead, and gathers the scores of distances. A TPU reads
the elements of such a gather one by one. The products are not larger for texts that are shorter than the number of
buckets, and twice as large for the longest texts of the published models. A program for texts of any length (ONNX)
gathers the scores, because its reshapes cannot depend on the length.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.models.deberta_v2.config import DebertaV2Config
from bertjax.nn.attention import AttentionChoices, AttentionModule
from bertjax.nn.dense import Dense
from bertjax.nn.kernels.pallas import has_kernels
from bertjax.nn.kernels.shift import can_shift, shift_on_chip
from bertjax.nn.ops.dropout import dropout
from bertjax.nn.ops.plain_attention import KeyValueCache
from bertjax.nn.relative_attention import distances, shift


class Distances(NamedTuple):
    """The embeddings of distances, which all layers share.

    Attributes:
      embeddings: `[rows, hidden]`.
      rows: int32 `[2 length - 1]`, the row of each distance, from the largest distance to the smallest. For a text of
        symbolic length, as in ONNX: the rows of all pairs, `[queries, keys]`.
    """

    embeddings: Array
    rows: Array


class Projected(NamedTuple):
    """The projections of hidden states, `[batch, length, heads, size]`, and of distances, `[distances, heads, size]`.

    The projections of distances are in the order of `Distances.rows`, or in the order of the embeddings for a text of
    symbolic length. They are None without their term of the scores.
    """

    queries: Array
    keys: Array
    values: Array
    distance_keys: Array | None
    distance_queries: Array | None
    rows: Array | None


def rows_of_distances(config: DebertaV2Config, length: Any) -> Array:
    """Returns `Distances.rows`."""
    largest, places = config.largest_distance, jnp.arange(length)
    in_text = distances(length, length, is_causal=False) if isinstance(length, int) else places[:, None] - places
    apart = np.arange(-largest, largest + 1)
    if 0 < config.position_buckets:
        apart = buckets_of(apart, config.position_buckets, largest)
    rows = np.clip(apart + config.distance_rows // 2, 0, config.distance_rows - 1).astype(np.int32)
    return jnp.asarray(rows)[jnp.clip(in_text, -largest, largest) + largest]


def buckets_of(apart: np.ndarray, buckets: int, largest: int) -> np.ndarray:
    """Returns the signed buckets of distances; `make_log_bucket_position` of transformers, in float32 as there.

    Distances up to half of the buckets have a bucket each. Larger distances have buckets of logarithmic widths.

    Args:
      apart: distances, integers.
      buckets: the number of buckets to one side.
      largest: the distance of the last bucket.
    """
    middle = buckets // 2
    if largest - 1 <= middle:
        return apart
    far = np.maximum(np.abs(apart), middle).astype(np.float32)
    log_of_last = np.log(np.float32((largest - 1) / middle))
    logarithmic = np.ceil(np.log(far / np.float32(middle)) / log_of_last * np.float32(middle - 1)) + middle
    return np.where(np.abs(apart) <= middle, apart, np.sign(apart) * logarithmic).astype(np.int64)


def scores_of(config: DebertaV2Config, projected: Projected, compute: Compute) -> Array:
    """Returns the float32 scores `[batch, heads, queries, keys]`.

    A kernel for TPUs moves the scores of distances to their places. These scores then have `compute.dtype`.
    """
    product: dict[str, Any] = dict(preferred_element_type=jnp.float32)
    rows, length = projected.rows, projected.keys.shape[1]
    if rows is None and has_kernels(compute.chip) and can_shift(length):
        return _scores_with_kernel(config, projected, compute)

    def of_pairs(by_distance: Array, rows: Array | None) -> Array:
        """Returns the scores of pairs: `[batch, heads, x, distances]` -> `[batch, heads, x, y]`."""
        if rows is None:
            return shift(by_distance, length)
        return jnp.take_along_axis(by_distance, jnp.broadcast_to(rows, (*by_distance.shape[:2], *rows.shape)), axis=-1)

    scores = jnp.einsum("bqhd,bkhd->bhqk", projected.queries, projected.keys, **product)
    if projected.distance_keys is not None:
        by_distance = jnp.einsum("bqhd,rhd->bhqr", projected.queries, projected.distance_keys, **product)
        scores += of_pairs(by_distance, rows)
    if projected.distance_queries is not None:
        # For a key, the distances of the queries ascend.
        ascending = projected.distance_queries[::-1] if rows is None else projected.distance_queries
        by_distance = jnp.einsum("bkhd,rhd->bhkr", projected.keys, ascending, **product)
        scores += jnp.swapaxes(of_pairs(by_distance, None if rows is None else rows.T), -1, -2)
    return scores / math.sqrt(config.head_size * (1 + len(config.position_terms)))


def _scores_with_kernel(config: DebertaV2Config, projected: Projected, compute: Compute) -> Array:
    def of_pairs(states: Array, distances: Array) -> Array:
        padded = jnp.pad(distances, ((0, 1), (0, 0), (0, 0)))  # an even number of distances
        by_distance = jnp.einsum("bqhd,rhd->bhqr", states, padded, preferred_element_type=jnp.float32)
        return shift_on_chip(by_distance.astype(compute.dtype), compute.chip).astype(jnp.float32)

    scores = jnp.einsum("bqhd,bkhd->bhqk", projected.queries, projected.keys, preferred_element_type=jnp.float32)
    if projected.distance_keys is not None:
        scores += of_pairs(projected.queries, projected.distance_keys)
    if projected.distance_queries is not None:
        scores += jnp.swapaxes(of_pairs(projected.keys, projected.distance_queries[::-1]), -1, -2)
    return scores / math.sqrt(config.head_size * (1 + len(config.position_terms)))


def _attend(
    projected: Projected, mask: Array, config: DebertaV2Config, compute: Compute, dropout_keys: Array | None
) -> Array:
    scores = jnp.where(mask, scores_of(config, projected, compute), jnp.finfo(jnp.float32).min)
    probs = nn.softmax(scores).astype(compute.dtype)
    probs = dropout(probs, config.attention_probs_dropout_prob, dropout_keys)
    return jnp.einsum("bhqk,bkhd->bqhd", probs, projected.values).astype(compute.dtype)


@dataclasses.dataclass(frozen=True)
class DisentangledChoices(AttentionChoices):
    """The choices of disentangled attention, which are fields of the model config."""

    config: DebertaV2Config

    def module(self, config: ModelConfig, compute: Compute, name: str | None = None) -> "DisentangledAttention":
        """Returns the module."""
        return DisentangledAttention(self.config, compute, name=name)

    def flops(self, hidden: int, length: int) -> int:
        """Returns the FLOPs of projections, scores and weighted values.

        The projections of the embeddings of distances are not included, because all rows of a batch share them.
        """
        terms = len(self.config.position_terms) if self.config.relative_attention else 0
        per_query = 2 * length + terms * (2 * length - 1)  # scores and weighted values; scores of all distances
        return 2 * length * hidden * (4 * hidden + per_query)


class DisentangledInputs(NamedTuple):
    """The inputs that all layers share.

    Attributes:
      apart: the embeddings of distances; None: no relative positions.
      mask: booleans `[batch, 1, queries, keys]`. A query without visible keys attends to all keys equally.
      convolved: the convolution of the embeddings; None: no convolution.
    """

    apart: Distances | None
    mask: Array
    convolved: Any = None


class DisentangledAttention(AttentionModule):
    """Multi-head self-attention with terms for relative positions, and the output projection.

    Unlike in transformers, the embeddings of distances have no dropout, because all rows share these embeddings.
    """

    config: DebertaV2Config
    compute: Compute

    def setup(self) -> None:
        """Builds the projections."""
        config, compute, hidden = self.config, self.compute, (self.config.hidden_size,)
        by_head, axes = (config.num_attention_heads, config.head_size), ("heads", "kv")
        stacked = (3, *by_head), ("embed", "projections", *axes)
        self.query_key_value = Dense(config, compute, hidden, *stacked)
        if config.relative_attention and not config.share_att_key:
            if "c2p" in config.position_terms:
                self.distance_key = Dense(config, compute, hidden, by_head, ("embed", *axes))
            if "p2c" in config.position_terms:
                self.distance_query = Dense(config, compute, hidden, by_head, ("embed", *axes))
        self.output = Dense(config, compute, by_head, hidden, (*axes, "embed"))

    def project(self, x: Array, apart: Distances | None, dropout_keys: Array | None = None) -> Projected:
        """Returns the projections of x `[batch, length, hidden]` and of distances; None: no relative positions."""
        states = jnp.moveaxis(self.query_key_value(x, dropout_keys), 2, 0)
        query = key = None
        if apart is not None:
            embeddings, terms = apart.embeddings[None], self.config.position_terms
            if self.config.share_att_key and terms:
                query, key, _ = jnp.moveaxis(self.query_key_value(embeddings)[0], 1, 0)
                query, key = query if "p2c" in terms else None, key if "c2p" in terms else None
            elif terms:
                query = self.distance_query(embeddings)[0] if "p2c" in terms else None
                key = self.distance_key(embeddings)[0] if "c2p" in terms else None
        if apart is None or apart.rows.ndim == 2:
            return Projected(states[0], states[1], states[2], key, query, None if apart is None else apart.rows)
        query, key = (None if rows is None else rows[apart.rows] for rows in (query, key))
        return Projected(states[0], states[1], states[2], key, query, None)

    def __call__(
        self,
        x: Array,
        shared: DisentangledInputs,
        dropout_keys: Array | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Array, Array | None, KeyValueCache | None]:
        """Returns the product of the output projection, and its bias, see `AttentionModule`.

        The backward pass recomputes the scores, which would take most of the memory.
        """
        projected = self.project(x, shared.apart, dropout_keys)
        projected = projected._replace(
            queries=nn.with_logical_constraint(projected.queries, ("batch", "length", "heads", "kv"))
        )
        attend = jax.checkpoint(_attend, static_argnums=(2, 3), prevent_cse=self.compute.unroll)
        context = attend(projected, shared.mask, self.config, self.compute, dropout_keys)
        product = self.output.product(context.reshape(*context.shape[:2], -1), dropout_keys)
        return product, self.output.bias, cache

    def probabilities(self, x: Array, shared: DisentangledInputs) -> Array:
        """Returns attention probabilities in float32, `[batch, heads, queries, keys]`."""
        scores = scores_of(self.config, self.project(x, shared.apart), self.compute)
        return nn.softmax(jnp.where(shared.mask, scores, jnp.finfo(jnp.float32).min))
