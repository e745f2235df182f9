"""The modules of Transformer-XL."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.models.transformer_xl.config import TransformerXLConfig
from bertjax.nn.attention import Dense, LayerNorm
from bertjax.nn.encoder import Embedding, activate, recomputed, stacked
from bertjax.nn.encoder_model import EncoderModel, layer_inputs
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.plain_attention import Cache, visible
from bertjax.nn.ops.recurrent_memory import Memory, last_states
from bertjax.nn.ops.segments import last_tokens
from bertjax.nn.relative_attention import (
    Biases,
    RelativeAttention,
    RelativeBiases,
    distance_embeddings,
    distances,
    layer_probabilities,
)

SITES = 4  # places of dropout in a layer


class TransformerXLModel(EncoderModel):
    """Word embeddings and layers. The last token is pooled, because it sees the whole text.

    Token types and positions have no effect: attention depends on distances.
    """

    config: TransformerXLConfig
    compute: Compute = Compute()

    def make_embeddings(self) -> nn.Module:
        """Returns the embeddings."""
        return ScaledEmbeddings(self.config, self.compute)

    def make_layers(self) -> nn.Module:
        """Returns the layers."""
        return TransformerXLEncoder(self.config, self.compute)

    def encode(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        positions: jax.Array | None = None,
        dropout_keys: jax.Array | None = None,
        *,
        every_layer: bool = False,
        memory: Memory | None = None,
    ) -> Any:
        """Returns hidden states as `EncoderModel.encode`; with a memory, the hidden states and the next memory."""
        x = self.embeddings(input_ids, fold_in(dropout_keys, 0))
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        hidden, memory = self.encoder(x, segments, dropout_keys, every_layer=every_layer, memory=memory)
        hidden = jnp.concatenate([x[None], hidden]) if every_layer else hidden
        return hidden if memory is None else (hidden, memory)

    def decode(self, input_ids: jax.Array, positions: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Runs the model on tokens that follow the tokens in a cache, as `BertModel.decode`.

        A token sees the last `memory_length` tokens.
        """
        return self.encoder(self.embeddings(input_ids), positions, cache=cache)

    def pool(self, hidden: jax.Array, segments: jax.Array, first_tokens: jax.Array | None) -> jax.Array:
        """Returns the pooled output of the last token of each example."""
        return self.pooler(hidden, last_tokens(segments, first_tokens))


class ScaledEmbeddings(nn.Module):
    """Word embeddings, multiplied by the square root of their size, and dropout."""

    config: TransformerXLConfig
    compute: Compute

    def setup(self) -> None:
        """Builds the submodules."""
        self.word = Embedding(self.config, self.compute.dtype, self.config.padded_vocab_size, "vocab")

    def __call__(self, input_ids: jax.Array, dropout_keys: jax.Array | None = None) -> jax.Array:
        """Returns the embeddings of token ids `[batch, length]`, `[batch, length, hidden]`."""
        config = self.config
        return dropout(self.word(input_ids) * config.embedding_size**0.5, config.hidden_dropout_prob, dropout_keys)


class TransformerXLEncoder(nn.Module):
    """The layers, a scan whose params are stacked, and dropout after the last layer."""

    config: TransformerXLConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        segments: jax.Array,
        dropout_keys: jax.Array | None = None,
        *,
        every_layer: bool = False,
        cache: Cache | None = None,
        memory: Memory | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns hidden states, see `EncoderModel.make_layers`; and the next cache, the next memory, or None.

        Args:
          x: `[batch, length, hidden]`.
          segments: `[batch, length]`; with a cache, the places of the tokens in the cache `[length]`, consecutive.
          dropout_keys: `[batch]`, or None.
          every_layer: return the states of all layers.
          cache: keys and values of earlier tokens `[layers, batch, length, heads, size]`, or None.
          memory: hidden states of earlier tokens, or None.
        """
        config, compute, length = self.config, self.compute, x.shape[1]
        count, places, memory_states = config.num_hidden_layers, None, None
        if cache is not None:
            places, keys = segments, cache.keys.shape[2]
            apart = places[-1] - jnp.arange(keys)  # as `distances`, but more keys may follow the tokens
            before = places[:, None] - jnp.arange(keys)
            mask = ((before >= 0) & (before <= config.memory_length))[None, None]
        else:
            mask = visible(segments, causal=True)
            if memory is not None:
                mask, memory_states = memory.extend_mask(mask), memory.by_layer()
            apart = distances(length, mask.shape[-1], is_causal=True)
        embedded = distance_embeddings(_clamped(config, apart), config.hidden_size)
        biases = None if config.untie_biases else RelativeBiases(config, name="biases")()

        in_axes = (0, 0, 0, *[nn.broadcast] * 5)
        make = stacked(recomputed(TransformerXLLayer, compute), count, in_axes, compute, dropout_keys is not None)
        numbers = jnp.arange(1, count + 1)  # 0 is the embeddings' dropout
        layers = make(config, compute, every_layer, name="layers")
        last, (states, kept) = layers(x, numbers, cache, memory_states, places, embedded, biases, mask, dropout_keys)
        last = dropout(last, config.hidden_dropout_prob, fold_in(fold_in(dropout_keys, count), SITES))
        kept = kept if memory is None else memory.advance(kept, length)
        return states.at[-1].set(last) if every_layer else last, kept


class TransformerXLLayer(nn.Module):
    """Attention and a feed-forward network. Dropout, a residual sum and a LayerNorm follow both.

    There is also dropout in the feed-forward network, as in the code of the paper.
    """

    config: TransformerXLConfig
    compute: Compute
    every_layer: bool = False  # also return x as an output of the scan

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        number: jax.Array,
        cache: Cache | None,
        memory: jax.Array | None,
        places: jax.Array | None,
        embedded: jax.Array,
        biases: Biases | None,
        mask: jax.Array,
        dropout_keys: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array | None, Any]]:
        """Returns x after layer `number`; and x or None, with the next cache, the `last_states`, or None.

        Args:
          x: `[batch, length, hidden]`.
          number: the number of the layer, from 1.
          cache: keys and values of earlier tokens, or None.
          memory: states of earlier tokens `[batch, memory, hidden]`, or None.
          places: the places of the tokens in the cache `[length]`, or None.
          embedded: `distance_embeddings`.
          biases: the biases that all layers share; None: the layer has biases.
          mask: booleans `[batch or 1, 1, length, keys]`.
          dropout_keys: `[batch]`, or None.
        """
        config, compute, rate = self.config, self.compute, self.config.hidden_dropout_prob
        keys = [fold_in(fold_in(dropout_keys, number), site) for site in range(SITES)]
        hidden, wide = (config.hidden_size,), (config.intermediate_size,)
        biases = RelativeBiases(config, name="biases")() if biases is None else biases

        attention = RelativeAttention(config, compute, name="attention")
        kept: Any = None
        context = x
        if memory is not None:
            kept, context = last_states(memory, x), jnp.concatenate([memory.astype(x.dtype), x], axis=1)
        read = attention.read(context, embedded, keys[0])
        if cache is not None and places is not None:
            read, kept = read.joined(cache, places[0])
        attended = attention(x, read, biases, mask, keys[0])
        none = jnp.zeros(hidden, attended.dtype)
        x = LayerNorm(config, compute, name="attention_norm").of_sum(x, attended, none, keys[1])

        inner = Dense(config, compute, hidden, wide, ("embed", "mlp"), name="intermediate")(x, keys[2])
        inner = nn.with_logical_constraint(activate(inner, config.hidden_act, compute), ("batch", "length", "mlp"))
        output = Dense(config, compute, wide, hidden, ("mlp", "embed"), name="output")
        outer = output.product(dropout(inner, rate, keys[2]), keys[2])
        x = LayerNorm(config, compute, name="output_norm").of_sum(x, outer, output.bias, keys[3])
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        return x, (x if self.every_layer else None, kept)


def attention_probabilities(
    config: TransformerXLConfig, params: dict, ids: jax.Array, segments: jax.Array
) -> jax.Array:
    """Returns attention probabilities `[layers, heads, queries, keys]`, see `ExposesAttention`."""
    length, encoder = ids.shape[1], params["encoder"]
    inputs = layer_inputs(TransformerXLModel(config), params, ids, segments, jnp.zeros_like(ids))
    apart = _clamped(config, distances(length, length, is_causal=True))
    mask = visible(segments, causal=True)
    return layer_probabilities(config, encoder["layers"], inputs, apart, mask, encoder.get("biases"))


def _clamped(config: TransformerXLConfig, apart: jax.Array) -> jax.Array:
    """Returns distances of at most `clamp_length`, if the limit is not 0."""
    return jnp.minimum(apart, config.clamp_length) if config.clamp_length else apart
