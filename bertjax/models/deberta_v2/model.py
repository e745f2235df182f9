"""The modules of DeBERTa-v2."""

from typing import NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.models.deberta_v2.attention import DisentangledAttention, Distances, rows_of_distances
from bertjax.models.deberta_v2.config import DebertaV2Config
from bertjax.nn.attention import Dense, LayerNorm, partitioned, standardize
from bertjax.nn.encoder import ACTIVATIONS, activate, recomputed, scan_layers
from bertjax.nn.encoder_model import EncoderModel, layer_inputs
from bertjax.nn.heads import Pooler
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.matmul import project
from bertjax.nn.ops.plain_attention import visible


class DebertaV2Model(EncoderModel):
    """The encoder of DeBERTa-v2: embeddings of BERT, layers with disentangled attention, and a pooler with GELU."""

    config: DebertaV2Config
    compute: Compute = Compute()

    def make_layers(self) -> nn.Module:
        """Returns the layers."""
        return DebertaV2Encoder(self.config, self.compute)

    def make_pooler(self) -> nn.Module:
        """Returns the pooler, the ContextPooler of transformers."""
        return Pooler(self.config, self.compute, ACTIVATIONS["gelu"])

    def pooler_input(self, hidden: jax.Array, dropout_keys: jax.Array | None) -> jax.Array:
        """Returns the hidden states with the dropout of the pooler."""
        # `heads.Classifier` uses the keys without the second `fold_in` for its dropout.
        keys = fold_in(fold_in(dropout_keys, self.config.num_hidden_layers + 1), 0)
        return dropout(hidden, self.config.pooler_dropout, keys)

    @nn.nowrap
    def attention_probabilities(
        self, params: dict, ids: jax.Array, segments: jax.Array, token_types: jax.Array
    ) -> jax.Array:
        """Returns attention probabilities `[layers, heads, queries, keys]`, see `ExposesAttention`."""
        inputs, mask = layer_inputs(self, params, ids, segments, token_types), visible(segments)
        apart = None
        if self.config.relative_attention:
            variables = {"params": params["encoder"]["distances"]}
            distances = DistanceEmbeddings(self.config, Compute())
            apart = cast(Distances, distances.apply(variables, ids.shape[1]))
        attention = DisentangledAttention(self.config, Compute())

        def of_layer(layer: dict, x: jax.Array) -> jax.Array:
            variables = {"params": layer["attention"]}
            return cast(jax.Array, attention.apply(variables, x, apart, mask, method="probabilities"))[0]

        return jax.lax.map(lambda layer_and_x: of_layer(*layer_and_x), (params["encoder"]["layers"], inputs))


class Convolved(NamedTuple):
    """The result of `Convolution` `[batch, length, hidden]`, and the params `[hidden]` of the LayerNorm of the sum."""

    states: jax.Array
    scale: jax.Array
    bias: jax.Array

    def added_to(self, x: jax.Array, config: DebertaV2Config, compute: Compute) -> jax.Array:
        """Returns the normalized sum of x `[batch, length, hidden]` and the convolution."""
        normal = standardize(x + self.states, config.layer_norm_eps, compute.chip)
        return (normal * self.scale + self.bias).astype(compute.dtype)


class Convolution(nn.Module):
    """A convolution of the embeddings within segments, dropout, and an activation (He et al. 2021, appendix A.5).

    The ConvLayer of transformers. Its sum with the output of the first layer is normalized.
    """

    config: DebertaV2Config
    compute: Compute

    @nn.compact
    def __call__(self, x: jax.Array, segments: jax.Array, dropout_keys: jax.Array | None) -> Convolved:
        """Convolves x `[batch, length, hidden]`."""
        config, size, width = self.config, self.config.hidden_size, self.config.conv_kernel_size
        init = nn.initializers.truncated_normal(config.initializer_range)
        kernel = self.param("kernel", partitioned(init, ("embed", "projections", None)), (size, width, size))
        bias = self.param("bias", partitioned(nn.initializers.zeros, (None,)), (size,))
        norm = LayerNorm(config, self.compute, name="norm")
        side, length = width // 2, x.shape[1]
        states = jnp.pad(x, ((0, 0), (side, side), (0, 0)))
        padded_segments = jnp.pad(segments, ((0, 0), (side, side)), constant_values=-1)
        total = bias.astype(x.dtype)
        for place in range(width):
            is_same = padded_segments[:, place : place + length] == segments
            neighbours = jnp.where(is_same[..., None], states[:, place : place + length], 0)
            total = total + project(neighbours, kernel[:, place], self.compute)
        activation = jnp.tanh if config.conv_act == "tanh" else ACTIVATIONS[config.conv_act]
        return Convolved(activation(dropout(total, config.hidden_dropout_prob, dropout_keys)), norm.scale, norm.bias)


class DistanceEmbeddings(nn.Module):
    """The embeddings of distances, with a LayerNorm."""

    config: DebertaV2Config
    compute: Compute

    @nn.compact
    def __call__(self, length: int) -> Distances:
        """Returns the embeddings, and their rows for the distances in a text of `length` tokens."""
        config = self.config
        init = partitioned(nn.initializers.truncated_normal(config.initializer_range), (None, "embed"))
        table = self.param("embedding", init, (config.distance_rows, config.hidden_size))
        table = table.astype(self.compute.dtype)
        if config.norm_rel_ebd == "layer_norm":
            table = LayerNorm(config, self.compute, name="norm")(table)
        return Distances(table, rows_of_distances(config, length))


class DebertaV2Encoder(nn.Module):
    """The layers of DeBERTa-v2, as a scan over stacked params, which share the embeddings of distances."""

    config: DebertaV2Config
    compute: Compute

    @nn.compact
    def __call__(
        self, x: jax.Array, segments: jax.Array, dropout_keys: jax.Array | None = None, *, every_layer: bool = False
    ) -> jax.Array:
        """Returns hidden states, see `EncoderModel.make_layers`."""
        config, compute = self.config, self.compute
        apart = convolved = None
        if config.relative_attention:
            apart = DistanceEmbeddings(config, compute, name="distances")(x.shape[1])
        if config.conv_kernel_size:
            keys = fold_in(fold_in(dropout_keys, 0), 0)  # the embeddings use the keys without the second `fold_in`
            convolved = Convolution(config, compute, name="convolution")(x, segments, keys)
        in_axes, trains = (0, *[nn.broadcast] * 4), dropout_keys is not None
        make = scan_layers(recomputed(DebertaV2Layer, compute), config.num_hidden_layers, in_axes, compute, trains)
        layers, numbers = make(config, compute, every_layer, name="layers"), 1 + jnp.arange(config.num_hidden_layers)
        last, states = layers(x, numbers, apart, convolved, visible(segments), dropout_keys)
        return states if every_layer else last


class DebertaV2Layer(nn.Module):
    """Attention and a feed-forward network, each followed by dropout, a residual connection and LayerNorm."""

    config: DebertaV2Config
    compute: Compute
    every_layer: bool = False  # whether the scan also returns the output of this layer

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        number: jax.Array,
        apart: Distances | None,
        convolved: Convolved | None,
        mask: jax.Array,
        dropout_keys: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns x `[batch, length, hidden]` after layer `number`; and x or None as the output of the scan."""
        config, compute = self.config, self.compute
        keys = [fold_in(fold_in(dropout_keys, number), site) for site in range(3)]
        hidden, wide = (config.hidden_size,), (config.intermediate_size,)
        attention = DisentangledAttention(config, compute, name="attention")
        attended = attention(x, apart, mask, keys[0])
        attention_norm = LayerNorm(config, compute, name="attention_norm")
        x = attention_norm.of_sum(x, attended, attention.output.bias, keys[1])

        inner = Dense(config, compute, hidden, wide, ("embed", "mlp"), name="intermediate")(x, keys[2])
        inner = nn.with_logical_constraint(activate(inner, config.hidden_act, compute), ("batch", "length", "mlp"))
        output = Dense(config, compute, wide, hidden, ("mlp", "embed"), name="output")
        output_norm = LayerNorm(config, compute, name="output_norm")
        x = output_norm.of_sum(x, output.product(inner, keys[2]), output.bias, keys[2])
        if convolved is not None:
            x = jnp.where(number == 1, convolved.added_to(x, config, compute), x)
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        return x, (x if self.every_layer else None)
