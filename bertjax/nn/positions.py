"""Positions of tokens: embeddings, rotations of queries and keys, and terms of the attention scores."""

import abc
import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.nn.dense import partitioned
from bertjax.nn.embedding_table import Embedding

# Positions that are added to word embeddings, or to the input of each layer.


class PositionEmbeddings(abc.ABC):
    """Embeddings of positions."""

    @abc.abstractmethod
    def module(self, config: ModelConfig, compute: Compute, size: int, name: str) -> nn.Module:
        """Returns a module that maps positions `[batch, length]` to embeddings `[batch, length, size]`."""


@dataclasses.dataclass(frozen=True)
class LearnedPositions(PositionEmbeddings):
    """A learned table (Devlin et al. 2019).

    Attributes:
      count: the number of positions, the maximum sequence length.
      offset: the number of unused rows before the row of the first position.
    """

    count: int
    offset: int = 0

    def module(self, config: ModelConfig, compute: Compute, size: int, name: str) -> nn.Module:
        """Returns an `Embedding` with `offset` unused rows."""
        return Embedding(config, compute.dtype, self.offset + self.count, "positions", size, self.offset, name=name)


@dataclasses.dataclass(frozen=True)
class SinusoidalPositions(PositionEmbeddings):
    """The position embeddings of the original Transformer (Vaswani et al. 2017, section 3.5).

    Attributes:
      count: the number of positions, the maximum sequence length.
    """

    count: int

    def module(self, config: ModelConfig, compute: Compute, size: int, name: str) -> nn.Module:
        """Returns a module without params."""
        return _Sinusoids(self.count, size, compute.dtype, name=name)


class _Sinusoids(nn.Module):
    count: int
    size: int
    dtype: str

    def __call__(self, positions: Array) -> Array:
        return sinusoids(self.count, self.size)[positions].astype(self.dtype)


def sinusoids(length: int, size: int) -> Array:
    """Returns the position embeddings of the original Transformer `[length, size]` (Vaswani et al. 2017, section 3.5).

    The original multiplies word embeddings by the root of `size` (section 3.4). Here the position embeddings are
    divided by this root, so that the sum differs by a constant factor.
    """
    angles = jnp.arange(length)[:, None] * 10_000.0 ** (-2 * jnp.arange((size + 1) // 2) / size)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(length, -1)[:, :size] / size**0.5


# Rotary positions.


class RotaryScaling(abc.ABC):
    """A change of the rotary frequencies, for texts that are longer than the texts of the pre-training."""

    @abc.abstractmethod
    def scale(self, frequencies: np.ndarray, base: float, size: int) -> np.ndarray:
        """Returns the scaled frequencies `[size / 2]`, in radians per position.

        Args:
          frequencies: the frequencies of `Rotary` without scaling.
          base: the base of the frequencies.
          size: the size of a head.
        """

    @property
    def factor_of_sines(self) -> float:
        """The factor of cosines and sines, which scales the attention scores by its square."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Divides all positions by a factor (Chen et al. 2023, position interpolation)."""

    factor: float

    def scale(self, frequencies: np.ndarray, base: float, size: int) -> np.ndarray:
        """Returns the frequencies, divided by the factor."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Divides low frequencies by a factor, and interpolates between low and high frequencies (Llama 3.1).

    Attributes:
      factor: the factor.
      low_freq_factor: longer waves than `original_length / low_freq_factor` positions are divided by the factor.
      high_freq_factor: shorter waves than `original_length / high_freq_factor` positions do not change.
      original_length: the sequence length of the pre-training.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def scale(self, frequencies: np.ndarray, base: float, size: int) -> np.ndarray:
        """Returns the scaled frequencies."""
        waves = self.original_length * frequencies / (2 * math.pi)  # in a text of the original length
        share = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = np.clip(share, 0, 1)
        return (1 - share) * frequencies / self.factor + share * frequencies


@dataclasses.dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """Interpolates between divided and unchanged frequencies, and scales the scores (YaRN, Peng et al. 2023).

    Attributes:
      factor: the factor.
      original_length: the sequence length of the pre-training.
      beta_fast: pairs that rotate more often in `original_length` positions do not change.
      beta_slow: pairs that rotate less often in `original_length` positions are divided by the factor.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def scale(self, frequencies: np.ndarray, base: float, size: int) -> np.ndarray:
        """Returns the scaled frequencies."""

        def pair_of(rotations: float) -> float:
            return size * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

        first, last = math.floor(pair_of(self.beta_fast)), math.ceil(pair_of(self.beta_slow))
        first, last = max(first, 0), min(last, size - 1)
        share = np.clip((np.arange(size // 2) - first) / (last - first or 0.001), 0, 1)
        return share * frequencies / self.factor + (1 - share) * frequencies

    @property
    def factor_of_sines(self) -> float:
        """The factor of the paper, section 3.4."""
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotations of queries and keys by angles that grow with the position (RoFormer, Su et al. 2021).

    Attributes:
      base: the base of the frequencies, theta.
      scaling: the scaling of the frequencies; None: no scaling.
    """

    base: float
    scaling: RotaryScaling | None = None

    def frequencies(self, size: int) -> np.ndarray:
        """Returns the frequencies of a head of a size, float32 `[size / 2]`, in radians per position."""
        frequencies = self.base ** (-np.arange(0, size, 2) / size)
        scaled = frequencies if self.scaling is None else self.scaling.scale(frequencies, self.base, size)
        return scaled.astype(np.float32)


# Terms of the attention scores.


class ScoreBias(abc.ABC):
    """A term of the attention scores that depends on the distance from the query to the key."""

    def table(self, model: nn.Module, config: ModelConfig) -> Any:
        """Returns the params of the term, which the method creates in a module; None: no params."""
        return None

    def scores(self, table: Any, heads: int, length: Any) -> Array:
        """Returns the term of rows without explicit positions, float32 `[heads, queries, keys]`.

        The term is equal in all rows: the positions of a segment are consecutive, so that the distance of two positions
        is the distance of the two places in the row.

        Args:
          table: the params.
          heads: the number of heads.
          length: the number of tokens in a row, which may be symbolic.
        """
        places = jnp.arange(length)
        return self.of_distances(table, heads, places - places[:, None])

    @abc.abstractmethod
    def of_distances(self, table: Any, heads: int, distances: Array) -> Array:
        """Returns the term of distances, float32 `[..., heads, queries, keys]`.

        Args:
          table: the params.
          heads: the number of heads.
          distances: integers `[..., queries, keys]`, the position of the key minus the position of the query.
        """


@dataclasses.dataclass(frozen=True)
class Alibi(ScoreBias):
    """Subtracts the distance times a slope, which differs between heads (Press et al. 2022), to both sides."""

    def of_distances(self, table: Any, heads: int, distances: Array) -> Array:
        """Returns the term, without params."""
        return -jnp.asarray(alibi_slopes(heads))[:, None, None] * jnp.abs(distances)[..., None, :, :]


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns the slopes of heads, float32 `[heads]`: 2 ** (-8 / n), 2 ** (-16 / n), ... for a power of two n.

    For other numbers of heads, the slopes of the next smaller power of two are followed by each other slope of the next
    larger power of two, as in the code of the paper.
    """
    smaller = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / smaller) for i in range(smaller)]
    between = [2 ** (-4 * (i + 1) / smaller) for i in range(0, 2 * smaller, 2)]
    return np.array((slopes + between)[:heads], np.float32)


@dataclasses.dataclass(frozen=True)
class RelativeBias(ScoreBias):
    """A learned term for each head and each bucket of distances, which all layers share (T5, Raffel et al. 2020).

    Attributes:
      buckets: the number of buckets of distances to both sides.
      longest: this distance and all larger distances are in the last bucket.
    """

    buckets: int
    longest: int

    def table(self, model: nn.Module, config: ModelConfig) -> Any:
        """Returns the param `relative_attention_bias` `[buckets, heads]`."""
        init = nn.initializers.truncated_normal(config.initializer_range)
        shape = self.buckets, config.num_attention_heads
        return model.param("relative_attention_bias", partitioned(init, (None, "heads")), shape)

    def of_distances(self, table: Any, heads: int, distances: Array) -> Array:
        """Returns the term of each distance."""
        buckets = distance_buckets(distances, self.buckets, self.longest)
        bias = jnp.moveaxis(jnp.take(table, buckets, axis=0), -1, -3)
        return nn.with_logical_constraint(bias, (*["batch"] * (bias.ndim - 3), "heads", None, None))


def distance_buckets(distances: Array, buckets: int, longest: int) -> Array:
    """Returns the numbers of the buckets of distances, as in T5 (Raffel et al. 2020, section 2.1).

    The first half of the buckets is for keys before the query, and for the query itself. In either half, the first half
    has one distance per bucket, and the other buckets grow with the logarithm of the distance.

    Args:
      distances: integers, the position of the key minus the position of the query.
      buckets: the number of buckets.
      longest: this distance and all larger distances are in the last bucket.
    """
    half, exact = buckets // 2, buckets // 4
    apart = np.arange(longest + 1)
    # NumPy computes the logarithms, because the rounding of a device could move the first distance of a bucket.
    share = np.log(np.maximum(apart, exact) / exact) / np.log(longest / exact)
    of_apart = np.minimum(np.where(apart < exact, apart, exact + (share * (half - exact)).astype(int)), half - 1)
    return jnp.where(distances > 0, half, 0) + jnp.asarray(of_apart)[jnp.minimum(jnp.abs(distances), longest)]
