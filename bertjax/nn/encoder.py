"""Embeddings and the stack of Transformer layers (Devlin et al. 2019, section 3).

A LayerNorm follows each part of a layer, or precedes it (`norm="pre"`, Radford et al. 2019, section 2.3).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import BertConfig, Compute, ModelConfig
from bertjax.nn.attention import Dense, LayerNorm, SelfAttention, partitioned, residual_sum
from bertjax.nn.kernels.gpu_activation import can_activate_on_gpu, gpu_activate
from bertjax.nn.kernels.pallas import has_kernels
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.plain_attention import KeyValueCache


def _gelu(x: Array) -> Array:
    """Returns x times the normal distribution function."""
    if x.dtype == jnp.float32:  # 1 + erf takes a third of the time of erfc, but cancels digits in bfloat16
        return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))
    return nn.gelu(x, approximate=False)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_new": functools.partial(nn.gelu, approximate=True),
    "relu": nn.relu,
    "silu": nn.silu,
}


def activate(inner: Array, activation: str, compute: Compute) -> Array:
    """Returns the activation of `inner` `[batch, length, wide]` in a feed-forward network.

    In a gated network `inner` is `[batch, length, 2, wide]`; returns the activation of the first half times the second
    half (Shazeer 2020).
    """
    if can_activate_on_gpu(compute, inner.shape[1], inner.shape[-1]):
        return gpu_activate(inner, None, activation, compute.chip)
    if inner.ndim == 3:
        return ACTIVATIONS[activation](inner)
    return ACTIVATIONS[activation](inner[..., 0, :]) * inner[..., 1, :]


class Embedding(nn.Module):
    """An embedding table `[rows, size]`; the default of `size` is the embedding size."""

    config: ModelConfig
    dtype: str
    rows: int
    axis: str | None = None
    size: int | None = None

    def setup(self) -> None:
        """Builds the table."""
        init = partitioned(nn.initializers.truncated_normal(self.config.initializer_range), (self.axis, "embed"))
        self.embedding = self.param("embedding", init, (self.rows, self.size or self.config.embedding_size))

    def __call__(self, ids: Any) -> Array:
        """Integers `[...]` -> `[..., size]`."""
        # Replicated for the lookup, because the compiler partitions lookups badly, or not at all.
        table = nn.with_logical_constraint(self.embedding, (None, None))
        # float32: the gradient of a frequent token sums thousands of terms, which loses precision in bfloat16.
        return jnp.take(table.astype(jnp.float32), ids, axis=0).astype(self.dtype)


def sinusoids(length: int, size: int) -> Array:
    """Returns the position embeddings of the original Transformer `[length, size]` (Vaswani et al. 2017, section 3.5).

    The original multiplies word embeddings by the root of `size` (section 3.4). Here the position embeddings are
    divided by this root, so that the sum differs by a constant factor.
    """
    angles = jnp.arange(length)[:, None] * 10_000.0 ** (-2 * jnp.arange((size + 1) // 2) / size)
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(length, -1)[:, :size] / size**0.5


class Embeddings(nn.Module):
    """Sums word, position and token-type embeddings; then LayerNorm (with `norm="post"`), dropout, and projection.

    The projection exists if `config.projects_embeddings`. A model with one token type uses it for
    all tokens, and a model with 0 token types has no embeddings of token types.
    """

    config: BertConfig
    compute: Compute

    def setup(self) -> None:
        """Builds the tables."""
        config, dtype = self.config, self.compute.dtype
        self.word = Embedding(config, dtype, config.padded_vocab_size, "vocab")
        if config.positions == "learned":
            rows = config.position_offset + config.max_position_embeddings
            self.position = Embedding(config, dtype, rows, "positions")
        if config.type_vocab_size:
            self.token_type = Embedding(config, dtype, config.type_vocab_size)
        size = config.embedding_size
        if config.norm == "post":
            self.norm = LayerNorm(config, self.compute, size=size)
        if config.projects_embeddings:
            self.projection = Dense(config, self.compute, (size,), (config.hidden_size,), ("embed", None))

    def __call__(
        self, input_ids: Array, token_types: Array, positions: Array, dropout_keys: Array | None = None
    ) -> Array:
        """Three `[batch, length]` integer arrays -> `[batch, length, hidden]`."""
        config = self.config
        x = self.word(input_ids)
        if config.positions == "learned":
            x += self.position(positions + config.position_offset)
        elif config.positions == "sinusoidal":
            x += sinusoids(config.max_position_embeddings, config.embedding_size)[positions].astype(x.dtype)
        if config.type_vocab_size:  # a lookup outside a table returns NaN
            x += self.token_type(token_types if config.type_vocab_size > 1 else jnp.zeros_like(token_types))
        x = self.norm(x) if config.norm == "post" else x
        x = dropout(x, config.hidden_dropout_prob, dropout_keys)
        return self.projection(x) if config.projects_embeddings else x


class EncoderLayer(nn.Module):
    """Self-attention and a two-layer feed-forward network, each followed by dropout, residual sum and LayerNorm.

    With `norm="pre"` each part begins with the LayerNorm. With `positions="each_layer"` each layer adds position
    embeddings to its input (Al-Rfou et al. 2019, section "Positional Embeddings").
    """

    config: BertConfig
    compute: Compute
    every_layer: bool = False  # whether x is also an output of the scan

    @nn.compact
    def __call__(
        self,
        x: Array,
        number: Array,
        cache: KeyValueCache | None,
        segments: Array,
        dropout_keys: Array | None,
        positions: Any,
        score_bias: Array | None,
    ) -> tuple[Array, tuple[Array | None, KeyValueCache | None]]:
        """Returns x `[batch, length, hidden]` for the next layer, and the outputs of the scan: x and the cache."""
        config = self.config
        if config.positions == "each_layer":
            rows = config.position_offset + config.max_position_embeddings
            table = Embedding(config, self.compute.dtype, rows, "positions", config.hidden_size, name="position")
            x += table(positions + config.position_offset)
        keys = [fold_in(fold_in(dropout_keys, number), site) for site in range(3)]
        if not config.attention_output_dropout:
            keys[1] = None

        is_pre, rate = config.norm == "pre", config.hidden_dropout_prob
        attention = SelfAttention(config, self.compute, name="attention")
        attention_norm = LayerNorm(config, self.compute, name="attention_norm")
        output_norm = LayerNorm(config, self.compute, name="output_norm")

        attended, bias, cache = attention(attention_norm(x) if is_pre else x, segments, keys[0], cache, score_bias)
        if is_pre:
            x, read = output_norm.and_sum(x, attended, bias, keys[1], rate)
        else:
            x = read = attention_norm.of_sum(x, attended, bias, keys[1])

        hidden, wide = (config.hidden_size,), (config.intermediate_size,)
        inner = Dense(config, self.compute, hidden, wide, ("embed", "mlp"), name="intermediate")
        output = Dense(config, self.compute, wide, hidden, ("mlp", "embed"), name="output")

        def project(output: Any, activated: Any) -> Array:
            return output.product(nn.with_logical_constraint(activated, ("batch", "length", "mlp")), keys[2])

        def activate_and_project(output: Any, inner: Array) -> Array:
            return project(output, ACTIVATIONS[config.hidden_act](inner))

        if can_activate_on_gpu(self.compute, x.shape[1], *wide):
            activated = gpu_activate(inner.product(read, keys[2]), inner.bias, config.hidden_act, self.compute.chip)
            outer = project(output, activated)
        else:
            if has_kernels(self.compute.chip):
                # The backward pass activates again: on TPUs this is faster than to write and read the result.
                activate_and_project = nn.remat(activate_and_project, prevent_cse=self.compute.unroll)
            outer = activate_and_project(output, inner(read, keys[2]))
        if is_pre:
            x = residual_sum(x, outer, output.bias, keys[2], rate)
        else:
            x = output_norm.of_sum(x, outer, output.bias, keys[2])
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        return x, (x if self.every_layer else None, cache)


def recomputed(layer: Callable[..., Any], compute: Compute) -> Callable[..., Any]:
    """Returns a layer of a scan whose backward pass recomputes values according to `compute.remat`.

    The layer is a module class, or a function whose first argument is a module.
    """
    if compute.remat == "none":
        return layer
    policy = jax.checkpoint_policies.checkpoint_dots if compute.remat == "dots" else None
    return nn.remat(layer, prevent_cse=False, policy=policy)  # a scan body needs no CSE guard


def scan_layers(
    layer: Callable[..., Any], count: int, in_axes: tuple, compute: Compute, trains: bool
) -> Callable[..., Any]:
    """Returns `count` layers as a scan, which training may unroll: params are stacked on a leading `layers` axis.

    Args:
      layer: the class of the layers.
      count: the number of layers.
      in_axes: for each input after the first: 0 if the input is stacked, `nn.broadcast` if all layers share it.
      compute: the settings, which may unroll the scan.
      trains: whether the program trains.
    """
    return nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=in_axes,
        length=count,
        unroll=count if compute.unroll and trains else 1,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )


# The axes of the inputs of `EncoderLayer` after x, in a scan over layers.
LAYER_AXES = (0, 0, *[nn.broadcast] * 4)


class Encoder(nn.Module):
    """`num_hidden_layers` layers, a scan that training may unroll: params are stacked on a leading `layers` axis."""

    config: BertConfig
    compute: Compute

    def make_layers(self, every_layer: bool, trains: bool) -> Callable[..., Any]:
        """Returns the layers, a function of the arguments of `EncoderLayer` with numbers and caches `[layers, ...]`.

        The function returns x for the next layer, and the outputs of all layers on a leading axis.

        Args:
          every_layer: whether the hidden states of all layers are among the outputs.
          trains: whether the program trains.
        """
        layer, count = recomputed(EncoderLayer, self.compute), self.config.num_hidden_layers
        make = scan_layers(layer, count, LAYER_AXES, self.compute, trains)
        return make(self.config, self.compute, every_layer, name="layers")

    @nn.compact
    def __call__(
        self,
        x: Array,
        segments: Array,
        dropout_keys: Array | None = None,
        positions: Array | None = None,
        *,
        every_layer: bool = False,
        cache: KeyValueCache | None = None,
        score_bias: Array | None = None,
    ) -> Any:
        """Returns the hidden states of the last layer, or with `every_layer` of all layers.

        Args:
          x: `[batch, length, hidden]`.
          segments: `[batch, length]`; with a cache the positions of the tokens, see `SelfAttention`.
          dropout_keys: `[batch]`; None: no dropout.
          positions: `[batch, length]`, for `positions="each_layer"`.
          every_layer: whether to return `[layers, batch, length, hidden]` instead of `[batch, length, hidden]`.
          cache: a cache whose arrays are stacked on `[layers]`. With a cache, the next cache is also returned.
          score_bias: a term of the attention scores of all layers, see `SelfAttention`.
        """
        layers = self.make_layers(every_layer, dropout_keys is not None)
        numbers = jnp.arange(1, self.config.num_hidden_layers + 1)  # 0 is the embeddings' dropout
        last, (states, cache) = layers(x, numbers, cache, segments, dropout_keys, positions, score_bias)
        if self.config.norm == "pre":
            last = LayerNorm(self.config, self.compute, name="norm")(last)
            states = states.at[-1].set(last) if every_layer else None
        if cache is not None:
            return last, cache
        return states if every_layer else last
