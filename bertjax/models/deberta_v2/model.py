"""The modules of DeBERTa-v2."""

from typing import NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.models.deberta_v2.attention import DisentangledInputs, Distances, rows_of_distances
from bertjax.models.deberta_v2.config import DebertaV2Config
from bertjax.nn.activations import ACTIVATIONS
from bertjax.nn.dense import partitioned
from bertjax.nn.encoder import Encoder, EncoderLayer
from bertjax.nn.encoder_model import TransformerModel
from bertjax.nn.norm import layer_norm, standardize
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.matmul import project
from bertjax.nn.ops.plain_attention import visible


class DebertaV2Model(TransformerModel):
    """The encoder of DeBERTa-v2."""

    def make_layers(self) -> Encoder:
        """Returns the layers."""
        return DebertaV2Encoder(self.config, self.compute, self.architecture.layers)


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
        norm = layer_norm(config, self.compute, "norm")
        side, length = width // 2, x.shape[1]
        states = jnp.pad(x, ((0, 0), (side, side), (0, 0)))
        padded_segments = jnp.pad(segments, ((0, 0), (side, side)), constant_values=-1)
        total = bias.astype(x.dtype)
        for place in range(width):
            is_same = padded_segments[:, place : place + length] == segments
            neighbours = jnp.where(is_same[..., None], states[:, place : place + length], 0)
            total = total + project(neighbours, kernel[:, place], self.compute)
        return Convolved(
            ACTIVATIONS[config.conv_act](dropout(total, config.hidden_dropout_prob, dropout_keys)),
            norm.scale,
            norm.bias,
        )


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
            table = layer_norm(config, self.compute, "norm")(table)
        return Distances(table, rows_of_distances(config, length))


class DebertaV2Encoder(Encoder):
    """The layers of DeBERTa-v2, which share the embeddings of distances."""

    config: ModelConfig

    def setup(self) -> None:
        """Builds the modules that all layers share."""
        config = cast(DebertaV2Config, self.config)
        if config.relative_attention:
            self.distances = DistanceEmbeddings(config, self.compute)
        if config.conv_kernel_size:
            self.convolution = Convolution(config, self.compute)

    def layer_class(self) -> type[EncoderLayer]:
        """Returns the class of a layer."""
        return DebertaV2Layer

    def shared_inputs(
        self,
        x: jax.Array,
        segments: jax.Array,
        positions: jax.Array | None,
        score_bias: jax.Array | None = None,
        dropout_keys: jax.Array | None = None,
    ) -> DisentangledInputs:
        """Returns the inputs that all layers share."""
        config, convolved = cast(DebertaV2Config, self.config), None
        apart = self.distances(x.shape[1]) if config.relative_attention else None
        if config.conv_kernel_size:
            keys = fold_in(fold_in(dropout_keys, 0), 0)  # the embeddings use the keys without the second `fold_in`
            convolved = self.convolution(x, segments, keys)
        return DisentangledInputs(apart, visible(segments), convolved)


class DebertaV2Layer(EncoderLayer):
    """A layer of BERT. The output of the first layer is added to a convolution of the embeddings."""

    def finish(self, x: jax.Array, number: jax.Array, shared: DisentangledInputs) -> jax.Array:
        """Returns the output of the layer, with the convolution after the first layer."""
        if shared.convolved is None:
            return x
        config = cast(DebertaV2Config, self.config)
        return jnp.where(number == 1, shared.convolved.added_to(x, config, self.compute), x)
