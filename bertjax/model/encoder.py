"""Embeddings and the stack of post-LayerNorm Transformer layers (Devlin et al. 2019, section 3)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config import BertConfig
from bertjax.model.attention import Dense, SelfAttention, layer_norm

ACTIVATIONS = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": functools.partial(nn.gelu, approximate=True),
    "relu": nn.relu,
}


class Embeddings(nn.Module):
    """Word + position + token-type embeddings, LayerNorm, dropout."""

    config: BertConfig
    dtype: jnp.dtype

    def setup(self):
        config = self.config

        def table(rows, axes):
            init = nn.initializers.truncated_normal(config.initializer_range)
            return nn.Embed(
                rows, config.hidden_size, dtype=self.dtype, embedding_init=nn.with_logical_partitioning(init, axes)
            )

        self.word = table(config.padded_vocab_size, ("vocab", "embed"))
        self.position = table(config.max_position_embeddings, (None, "embed"))
        self.token_type = table(config.type_vocab_size, (None, "embed"))
        self.norm = layer_norm(config, self.dtype)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def __call__(self, input_ids, token_types, positions, *, deterministic: bool):
        """Three `[batch, length]` integer arrays -> `[batch, length, hidden]`."""
        x = self.word(input_ids) + self.position(positions) + self.token_type(token_types)
        return self.dropout(self.norm(x), deterministic=deterministic)


class EncoderLayer(nn.Module):
    """Self-attention and a two-layer feed-forward net, each with dropout, residual and LayerNorm after it."""

    config: BertConfig
    dtype: jnp.dtype
    deterministic: bool
    every_layer: bool = False  # also give x as an output of the scan

    @nn.compact
    def __call__(self, x, segments):
        config, dtype = self.config, self.dtype
        dropout = functools.partial(nn.Dropout(config.hidden_dropout_prob), deterministic=self.deterministic)

        attended = SelfAttention(config, dtype, name="attention")(x, segments, deterministic=self.deterministic)
        x = layer_norm(config, dtype, name="attention_norm")(x + dropout(attended))

        inner = Dense(config, dtype, (config.intermediate_size,), ("embed", "mlp"), name="intermediate")(x)
        inner = nn.with_logical_constraint(ACTIVATIONS[config.hidden_act](inner), ("batch", "length", "mlp"))
        outer = Dense(config, dtype, (config.hidden_size,), ("mlp", "embed"), name="output")(inner)
        x = layer_norm(config, dtype, name="output_norm")(x + dropout(outer))
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        return x, x if self.every_layer else None


class Encoder(nn.Module):
    """`num_hidden_layers` layers, scanned: their params are stacked on a leading `layers` axis."""

    config: BertConfig
    dtype: jnp.dtype
    remat: str = "none"

    @nn.compact
    def __call__(self, x, segments, *, deterministic: bool, every_layer: bool = False):
        """The last layer's `[batch, length, hidden]`; with `every_layer` all of them, stacked in front."""
        layer = EncoderLayer
        if self.remat != "none":
            policy = jax.checkpoint_policies.checkpoint_dots if self.remat == "dots" else None
            layer = nn.remat(layer, prevent_cse=False, policy=policy)  # inside a scan nothing can be merged back
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.config.num_hidden_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(self.config, self.dtype, deterministic, every_layer, name="layers")
        last, each = layers(x, segments)
        return each if every_layer else last
