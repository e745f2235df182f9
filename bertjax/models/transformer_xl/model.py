"""The modules of Transformer-XL."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.models.transformer_xl.config import TransformerXLConfig
from bertjax.nn import relative_attention
from bertjax.nn.activations import activate
from bertjax.nn.dense import Dense
from bertjax.nn.embedding_table import Embedding
from bertjax.nn.encoder import recomputed, scan_layers
from bertjax.nn.encoder_model import EncoderModel, layer_inputs
from bertjax.nn.norm import layer_norm
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.plain_attention import KeyValueCache, visible
from bertjax.nn.ops.recurrent_memory import RecurrentMemory, last_states
from bertjax.nn.ops.segments import last_tokens

DROPOUT_SITES = 4  # the number of dropouts in a layer; each dropout folds its number into the random keys


class TransformerXLModel(EncoderModel):
    """The encoder of Transformer-XL. The last token of a text, which attends to the whole text, is pooled.

    The arguments `token_types` and `positions` are ignored, because attention depends on relative distances.
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
        memory: RecurrentMemory | None = None,
    ) -> Any:
        """Returns hidden states, see `EncoderModel.encode`; with `memory`, returns (hidden states, next memory)."""
        x = self.embeddings(input_ids, fold_in(dropout_keys, 0))
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        hidden, memory = self.encoder(x, segments, dropout_keys, every_layer=every_layer, memory=memory)
        hidden = jnp.concatenate([x[None], hidden]) if every_layer else hidden
        return hidden if memory is None else (hidden, memory)

    def decode(
        self, input_ids: jax.Array, positions: jax.Array, cache: KeyValueCache
    ) -> tuple[jax.Array, KeyValueCache]:
        """Runs the model on tokens that follow the tokens in a cache, see `TransformerModel.decode`.

        A token attends to the previous `memory_length` tokens and to itself.
        """
        return self.encoder(self.embeddings(input_ids), positions, cache=cache)

    def pool(self, hidden: jax.Array, segments: jax.Array, first_tokens: jax.Array | None) -> jax.Array:
        """Returns the pooled output of the last token of each example."""
        return self.pooler(hidden, last_tokens(segments, first_tokens))

    @nn.nowrap
    def attention_probabilities(
        self, params: dict, ids: jax.Array, segments: jax.Array, token_types: jax.Array
    ) -> jax.Array:
        """Returns attention probabilities `[layers, heads, queries, keys]`, see `ExposesAttention`."""
        config, length, encoder = self.config, ids.shape[1], params["encoder"]
        inputs = layer_inputs(self, params, ids, segments, token_types)
        key_distances = _clamped(config, relative_attention.distances(length, length, is_causal=True))
        mask = visible(segments, causal=True)
        return relative_attention.layer_probabilities(
            config, encoder["layers"], inputs, key_distances, mask, encoder.get("biases")
        )


class ScaledEmbeddings(nn.Module):
    """Word embeddings, multiplied by the square root of the embedding size, and dropout."""

    config: TransformerXLConfig
    compute: Compute

    def setup(self) -> None:
        """Builds the submodules."""
        self.word = Embedding(self.config, self.compute.dtype, self.config.padded_vocab_size, "vocab")

    def __call__(self, input_ids: jax.Array, dropout_keys: jax.Array | None = None) -> jax.Array:
        """Embeds token ids: `[batch, length]` -> `[batch, length, hidden]`."""
        config = self.config
        return dropout(self.word(input_ids) * config.embedding_size**0.5, config.hidden_dropout_prob, dropout_keys)


class TransformerXLEncoder(nn.Module):
    """The layers of Transformer-XL, as a scan over stacked params, and dropout after the last layer."""

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
        cache: KeyValueCache | None = None,
        memory: RecurrentMemory | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns hidden states, see `EncoderModel.make_layers`, and the next cache, the next memory, or None.

        Args:
          x: `[batch, length, hidden]`.
          segments: `[batch, length]`; with a cache, the consecutive positions of the tokens in the cache `[length]`.
          dropout_keys: `[batch]`, or None.
          every_layer: whether to return the hidden states of all layers `[layers, batch, length, hidden]`.
          cache: keys and values of earlier tokens `[layers, batch, length, heads, size]`, or None.
          memory: hidden states of earlier tokens, or None.
        """
        config, compute, length = self.config, self.compute, x.shape[1]
        count, places, memory_states = config.num_hidden_layers, None, None
        if cache is not None:
            places, keys = segments, cache.keys.shape[2]
            key_distances = places[-1] - jnp.arange(keys)  # like `distances`, but unused places follow the last token
            distance = places[:, None] - jnp.arange(keys)
            mask = ((distance >= 0) & (distance <= config.memory_length))[None, None]
        else:
            mask = visible(segments, causal=True)
            if memory is not None:
                mask, memory_states = memory.extend_mask(mask), memory.by_layer()
            key_distances = relative_attention.distances(length, mask.shape[-1], is_causal=True)
        embedded_distances = relative_attention.distance_embeddings(_clamped(config, key_distances), config.hidden_size)
        biases = None if config.untie_biases else relative_attention.RelativeBiases(config, name="biases")()

        in_axes = (0, 0, 0, *[nn.broadcast] * 5)
        make = scan_layers(recomputed(TransformerXLLayer, compute), count, in_axes, compute, dropout_keys is not None)
        numbers = jnp.arange(1, count + 1)  # number 0 is the dropout of the embeddings
        layers = make(config, compute, every_layer, name="layers")
        scan_inputs = (x, numbers, cache, memory_states, places, embedded_distances, biases, mask, dropout_keys)
        last, (states, next_states) = layers(*scan_inputs)
        last = dropout(last, config.hidden_dropout_prob, fold_in(fold_in(dropout_keys, count), DROPOUT_SITES))
        next_states = next_states if memory is None else memory.advance(next_states, length)
        return states.at[-1].set(last) if every_layer else last, next_states


class TransformerXLLayer(nn.Module):
    """Attention and a feed-forward network (post-norm).

    Dropout, a residual connection and a LayerNorm follow the attention and the feed-forward network. The feed-forward
    network also has dropout after its activation, as in the code of the paper.
    """

    config: TransformerXLConfig
    compute: Compute
    every_layer: bool = False  # whether the scan also returns the output of this layer

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        number: jax.Array,
        cache: KeyValueCache | None,
        memory: jax.Array | None,
        places: jax.Array | None,
        embedded_distances: jax.Array,
        biases: relative_attention.Biases | None,
        mask: jax.Array,
        dropout_keys: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array | None, Any]]:
        """Returns x after layer `number`; and the outputs of the scan: (x or None, next cache, `last_states` or None).

        Args:
          x: `[batch, length, hidden]`.
          number: the number of the layer, from 1.
          cache: keys and values of earlier tokens `[batch, length, heads, size]`, or None.
          memory: hidden states of earlier tokens `[batch, memory, hidden]`, or None.
          places: the positions of the tokens in the cache `[length]`, or None.
          embedded_distances: `distance_embeddings` `[distances, hidden]`.
          biases: the biases that all layers share; None if the layer has separate biases.
          mask: booleans `[batch or 1, 1, length, keys]`.
          dropout_keys: `[batch]`, or None.
        """
        config, compute, rate = self.config, self.compute, self.config.hidden_dropout_prob
        keys = [fold_in(fold_in(dropout_keys, number), site) for site in range(DROPOUT_SITES)]
        hidden, wide = (config.hidden_size,), (config.intermediate_size,)
        biases = relative_attention.RelativeBiases(config, name="biases")() if biases is None else biases

        attention = relative_attention.RelativeAttention(config, compute, name="attention")
        next_states: Any = None
        context = x
        if memory is not None:
            next_states, context = last_states(memory, x), jnp.concatenate([memory.astype(x.dtype), x], axis=1)
        read = attention.read(context, embedded_distances, keys[0])
        if cache is not None and places is not None:
            read, next_states = read.joined(cache, places[0])
        attended = attention(x, read, biases, mask, keys[0])
        no_bias = jnp.zeros(hidden, attended.dtype)
        x = layer_norm(config, compute, "attention_norm").of_sum(x, attended, no_bias, keys[1], rate)

        inner = Dense(config, compute, hidden, wide, ("embed", "mlp"), name="intermediate")(x, keys[2])
        inner = nn.with_logical_constraint(activate(inner, config.hidden_act, compute), ("batch", "length", "mlp"))
        output = Dense(config, compute, wide, hidden, ("mlp", "embed"), name="output")
        outer = output.product(dropout(inner, rate, keys[2]), keys[2])
        x = layer_norm(config, compute, "output_norm").of_sum(x, outer, output.bias, keys[3], rate)
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        return x, (x if self.every_layer else None, next_states)


def _clamped(config: TransformerXLConfig, key_distances: jax.Array) -> jax.Array:
    """Returns distances, clamped to `clamp_length` unless it is 0."""
    return jnp.minimum(key_distances, config.clamp_length) if config.clamp_length else key_distances
