"""Embeddings and the stack of post-LayerNorm Transformer layers (Devlin et al. 2019, section 3)."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config import BertConfig
from bertjax.model.attention import Dense, SelfAttention, layer_norm
from bertjax.model.dropout import dropout, fold_in

ACTIVATIONS = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": functools.partial(nn.gelu, approximate=True),
    "relu": nn.relu,
}


class Embedding(nn.Module):
    """A `[rows, hidden_size]` embedding table."""

    config: BertConfig
    dtype: jnp.dtype
    rows: int
    axis: str | None = None

    def setup(self):
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        init = nn.with_logical_partitioning(init, (self.axis, "embed"))
        self.embedding = self.param("embedding", init, (self.rows, self.config.hidden_size))

    def __call__(self, ids):
        # Replicated for the lookup: the compiler partitions lookups badly, or not at all.
        table = nn.with_logical_constraint(self.embedding, (None, None))
        # float32: the gradient of a frequent token sums thousands of terms, which loses precision in bfloat16.
        return jnp.take(table.astype(jnp.float32), ids, axis=0).astype(self.dtype)


class Embeddings(nn.Module):
    """Sums word, position and token-type embeddings, then applies LayerNorm and dropout."""

    config: BertConfig
    dtype: jnp.dtype

    def setup(self):
        config = self.config

        self.word = Embedding(config, self.dtype, config.padded_vocab_size, "vocab")
        self.position = Embedding(config, self.dtype, config.max_position_embeddings)
        self.token_type = Embedding(config, self.dtype, config.type_vocab_size)
        self.norm = layer_norm(config, self.dtype)

    def __call__(self, input_ids, token_types, positions, dropout_keys=None):
        """Three `[batch, length]` integer arrays -> `[batch, length, hidden]`."""
        x = self.word(input_ids) + self.position(positions) + self.token_type(token_types)
        return dropout(self.norm(x), self.config.hidden_dropout_prob, dropout_keys)


class EncoderLayer(nn.Module):
    """Self-attention and a two-layer feed-forward network, each followed by dropout, residual sum and LayerNorm."""

    config: BertConfig
    dtype: jnp.dtype
    every_layer: bool = False  # also return x as an output of the scan

    @nn.compact
    def __call__(self, x, number, segments, dropout_keys):
        config, dtype, rate = self.config, self.dtype, self.config.hidden_dropout_prob
        keys = [fold_in(fold_in(dropout_keys, number), site) for site in range(3)]

        attended = SelfAttention(config, dtype, name="attention")(x, segments, keys[0])
        x = layer_norm(config, dtype, name="attention_norm")(x + dropout(attended, rate, keys[1]))

        inner = Dense(config, dtype, (config.intermediate_size,), ("embed", "mlp"), name="intermediate")(x)
        inner = nn.with_logical_constraint(ACTIVATIONS[config.hidden_act](inner), ("batch", "length", "mlp"))
        outer = Dense(config, dtype, (config.hidden_size,), ("mlp", "embed"), name="output")(inner)
        x = layer_norm(config, dtype, name="output_norm")(x + dropout(outer, rate, keys[2]))
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        return x, x if self.every_layer else None


class Encoder(nn.Module):
    """`num_hidden_layers` layers, scanned: their params are stacked on a leading `layers` axis."""

    config: BertConfig
    dtype: jnp.dtype
    remat: str = "none"

    @nn.compact
    def __call__(self, x, segments, dropout_keys=None, *, every_layer: bool = False):
        """The last layer's `[batch, length, hidden]`, or with `every_layer` all `[layers, batch, length, hidden]`."""
        layer = EncoderLayer
        if self.remat != "none":
            policy = jax.checkpoint_policies.checkpoint_dots if self.remat == "dots" else None
            layer = nn.remat(layer, prevent_cse=False, policy=policy)  # a scan body needs no CSE guard
        layers = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=self.config.num_hidden_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )(self.config, self.dtype, every_layer, name="layers")
        numbers = jnp.arange(1, self.config.num_hidden_layers + 1)  # 0 is the embeddings' dropout
        last, each = layers(x, numbers, segments, dropout_keys)
        return each if every_layer else last
