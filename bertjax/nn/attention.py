"""Multi-head self-attention (Vaswani et al. 2017, section 3.2) within segments."""

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.nn.attention_implementations import AttentionCall, Projections, implementation_of
from bertjax.nn.dense import Dense
from bertjax.nn.norm import Norm, Normalize
from bertjax.nn.ops.plain_attention import KeyValueCache, cached_attention, visible
from bertjax.nn.ops.rotary import Rotation, rotate
from bertjax.nn.positions import Rotary


class SharedInputs(NamedTuple):
    """The inputs that all layers share.

    Attributes:
      segments: `[batch, length]`; with a cache, the positions of the tokens `[length]`, see `cached_attention`.
      positions: `[batch, length]`; None if no layer reads positions.
      rotations: {`Attention.rotation_key`: the rotation}.
      score_bias: a term of the attention scores, float32 `[heads, queries, keys]`, or with a mask `[batch, heads,
        queries, keys]`; None: no term.
      mask: booleans `[batch, queries, keys]`, the tokens that each token attends to, in place of `segments`. The keys
        are the first tokens of the row. None: tokens attend within their segment.
    """

    segments: Array
    positions: Array | None = None
    rotations: dict[str, Rotation] | None = None
    score_bias: Array | None = None
    mask: Array | None = None


class AttentionModule(nn.Module):
    """The base class of the attention of a layer, with its output projection."""

    def __call__(
        self, x: Array, shared: Any, dropout_keys: Array | None = None, cache: KeyValueCache | None = None
    ) -> tuple[Array, Array | None, KeyValueCache | None]:
        """Returns the product of the output projection, the bias, which is not added yet, and the next cache.

        Args:
          x: `[batch, length, hidden]`; the product has the same shape.
          shared: the inputs that all layers share, see `Encoder.shared_inputs`.
          dropout_keys: `[batch]`; None: no dropout.
          cache: the keys and values of earlier tokens; None: no cache.
        """
        raise NotImplementedError

    def probabilities(self, x: Array, shared: Any) -> Array:
        """Returns attention probabilities in float32, `[batch, heads, queries, keys]`; arguments as in `__call__`."""
        raise NotImplementedError


class AttentionChoices(abc.ABC):
    """The choices of the attention of a layer. Equal choices compare equal.

    A family with another kind of attention derives its choices and its module from the base classes.
    """

    @abc.abstractmethod
    def module(self, config: ModelConfig, compute: Compute, name: str | None = None) -> AttentionModule:
        """Returns the module."""

    @abc.abstractmethod
    def flops(self, hidden: int, length: int) -> int:
        """Returns the FLOPs of the matrix products for one row.

        Args:
          hidden: the size of hidden states.
          length: the length of the row in tokens.
        """


@dataclasses.dataclass(frozen=True)
class Attention(AttentionChoices):
    """The choices of self-attention.

    Attributes:
      heads: the number of heads.
      head_size: the size of a head.
      key_value_heads: the number of heads of keys and values, which divides `heads` (grouped-query attention; Ainslie
        et al. 2023). None: as many as heads, in one kernel `query_key_value`.
      bias: whether the projections have biases.
      output_bias: whether the output projection has a bias.
      dropout: the dropout rate of the probabilities.
      rotary: rotations of queries and keys; None: no rotations.
      window: the largest distance to a token, to either side; None: any distance.
      causal: tokens attend to earlier tokens and to themselves.
      query_key_norm: the norm of queries and keys in each head, before rotations (Henry et al. 2020); None: no norm.
      scale: the factor of the scores; None: one over the root of the head size.
      soft_cap: the scores are `soft_cap * tanh(scores / soft_cap)`; None: no cap (Gemma 2).
      implementation: see `AttentionCall.preference`.
      output_init_scale: multiplies the standard deviation of the initial values of the output projection.
    """

    heads: int
    head_size: int
    key_value_heads: int | None = None
    bias: bool = True
    output_bias: bool = True
    dropout: float = 0.0
    rotary: Rotary | None = None
    window: int | None = None
    causal: bool = False
    query_key_norm: Norm | None = None
    scale: float | None = None
    soft_cap: float | None = None
    implementation: str = "auto"
    output_init_scale: float = 1.0

    @property
    def rotation_key(self) -> str:
        """The key of the rotation in `SharedInputs`: equal for equal rotations of heads of equal sizes."""
        return f"{self.rotary!r} {self.head_size}"

    def module(self, config: ModelConfig, compute: Compute, name: str | None = None) -> "SelfAttention":
        """Returns the module."""
        return SelfAttention(config, compute, self, name=name)

    def flops(self, hidden: int, length: int) -> int:
        """Returns the FLOPs of projections, scores and weighted values."""
        width, shared = self.heads * self.head_size, (self.key_value_heads or self.heads) * self.head_size
        keys = length if self.window is None else min(length, 2 * self.window + 1)
        return 2 * length * (2 * hidden * width + 2 * hidden * shared + 2 * keys * width)


class SelfAttention(AttentionModule):
    """Self-attention. `implementation_of` chooses the implementation by chip, sizes and features."""

    config: ModelConfig
    compute: Compute
    choices: Attention

    def setup(self) -> None:
        """Builds the projections."""
        config, compute, choices = self.config, self.compute, self.choices
        hidden, by_head, axes = (config.hidden_size,), (choices.heads, choices.head_size), ("heads", "kv")
        stacked_axes = ("embed", "projections", *axes)
        if choices.key_value_heads is None:
            self.query_key_value = Dense(config, compute, hidden, (3, *by_head), stacked_axes, choices.bias)
        else:
            shared = 2, choices.key_value_heads, choices.head_size
            self.query = Dense(config, compute, hidden, by_head, ("embed", *axes), choices.bias)
            self.key_value = Dense(config, compute, hidden, shared, stacked_axes, choices.bias)
        if choices.query_key_norm is not None:
            self.query_norm = Normalize(choices.query_key_norm, choices.head_size, compute, "kv")
            self.key_norm = Normalize(choices.query_key_norm, choices.head_size, compute, "kv")
        settings = choices.output_bias, choices.output_init_scale
        self.output = Dense(config, compute, by_head, hidden, (*axes, "embed"), *settings)

    def __call__(
        self, x: Array, shared: SharedInputs, dropout_keys: Array | None = None, cache: KeyValueCache | None = None
    ) -> tuple[Array, Array | None, KeyValueCache | None]:
        """Returns the product of the output projection, its bias, and the next cache, see `AttentionModule`."""
        choices, segments = self.choices, shared.segments
        if cache is not None:
            if choices.window is not None or choices.soft_cap is not None or shared.score_bias is not None:
                raise NotImplementedError("attention with a cache has no window, no soft cap and no term of the scores")
            context, cache = cached_attention(self.states(x, shared), segments, cache)
        else:
            call = AttentionCall(
                self.compute,
                choices.implementation,
                x,
                segments,
                choices.heads,
                choices.head_size,
                self._projects_in_kernel(dropout_keys),
                self._rotation(shared),
                dropout_keys if choices.dropout else None,
                choices.dropout,
                choices.causal,
                choices.window,
                shared.score_bias,
                choices.soft_cap,
                shared.mask,
            )
            context = implementation_of(call)(call, _Projections(self, x, shared, dropout_keys))
        return self.output.product(context, dropout_keys), self.output.bias, cache

    def probabilities(self, x: Array, shared: SharedInputs) -> Array:
        """Returns attention probabilities in float32, `[batch, heads, queries, keys]`."""
        choices = self.choices
        query, key, _ = jnp.moveaxis(self.states(x, shared).astype(jnp.float32), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, precision="highest") / math.sqrt(choices.head_size)
        if choices.soft_cap is not None:
            scores = choices.soft_cap * jnp.tanh(scores / choices.soft_cap)
        scores = scores if shared.score_bias is None else scores + shared.score_bias
        mask = visible(shared.segments, choices.causal, choices.window)
        return nn.softmax(jnp.where(mask, scores, -jnp.inf))

    def states(self, x: Array, shared: SharedInputs, dropout_keys: Array | None = None) -> Array:
        """Returns queries, keys and values `[batch, length, 3, heads, size]`.

        Queries and keys are normalized, scaled and rotated. The keys and values of a group of heads are repeated.
        """
        choices = self.choices
        if choices.key_value_heads is None:
            states = self.query_key_value(x, dropout_keys)
        else:
            states = joined(self.query(x, dropout_keys), self.key_value(x, dropout_keys))
        if choices.query_key_norm is not None:
            query, key, value = jnp.moveaxis(states, 2, 0)
            states = jnp.stack([self.query_norm(query), self.key_norm(key), value], axis=2)
        if choices.scale is not None:  # implementations divide by the root of the size
            factor = choices.scale * math.sqrt(choices.head_size)
            states = states * jnp.array([factor, 1, 1], states.dtype)[:, None, None]
        rotation = self._rotation(shared)
        return states if rotation is None else rotate(states, rotation)

    def kernel_and_bias(self) -> tuple[Array, Array | None]:
        """Returns the kernel `[hidden, 3, heads, size]` of all projections, and the bias; for `Projections.params`."""
        dtype = self.compute.dtype
        if self.choices.key_value_heads is None:
            kernel, bias = self.query_key_value.merged(), self.query_key_value.bias
        else:
            kernel, bias = joined(self.query.merged(), self.key_value.merged()), None
            if self.choices.bias:
                bias = joined(self.query.bias, self.key_value.bias)
        return kernel.astype(dtype), None if bias is None else bias.astype(dtype)

    def _rotation(self, shared: SharedInputs) -> Rotation | None:
        if self.choices.rotary is None or shared.rotations is None:
            return None
        return shared.rotations[self.choices.rotation_key]

    def _projects_in_kernel(self, dropout_keys: Array | None) -> bool:
        if self.choices.query_key_norm is not None or self.choices.scale is not None:
            return False
        if self.choices.key_value_heads is None:
            return self.query_key_value.can_merge(dropout_keys)
        return self.query.can_merge(dropout_keys) and self.key_value.can_merge(dropout_keys)


class _Projections(Projections):
    def __init__(self, attention: SelfAttention, x: Array, shared: SharedInputs, dropout_keys: Array | None):
        self._attention, self._inputs = attention, (x, shared, dropout_keys)

    def states(self) -> Array:
        return self._attention.states(*self._inputs)

    def params(self) -> tuple[Array, Array | None]:
        return self._attention.kernel_and_bias()


def joined(query: Array, key_value: Any) -> Array:
    """Queries `[..., heads, size]`, shared keys and values `[..., 2, groups, size]` -> `[..., 3, heads, size]`."""
    repeated = jnp.repeat(key_value, query.shape[-2] // key_value.shape[-2], axis=-2)
    return jnp.concatenate([query[..., None, :, :], repeated], axis=-3)
