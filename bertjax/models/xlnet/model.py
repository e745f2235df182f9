"""The modules of XLNet."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.models.xlnet.config import XlnetConfig
from bertjax.nn import relative_attention
from bertjax.nn.activations import activate
from bertjax.nn.dense import Dense
from bertjax.nn.embedding_table import Embedding
from bertjax.nn.encoder import recomputed, scan_layers
from bertjax.nn.encoder_model import EncoderModel, layer_inputs
from bertjax.nn.norm import layer_norm
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.plain_attention import visible
from bertjax.nn.ops.recurrent_memory import RecurrentMemory, last_states
from bertjax.nn.ops.segments import last_tokens


class View(NamedTuple):
    """The attention mask of a stream, and the relation of its hidden states to the keys.

    Attributes:
      mask: booleans `[batch, 1, states, keys]`.
      is_same: booleans `[batch, states, keys]`: whether a state and a key have the same token type.
      places: `[batch, states]`, the index among the keys of the token of each state; None if the states are the last
        keys.
    """

    mask: jax.Array
    is_same: jax.Array
    places: jax.Array | None = None


class XlnetModel(EncoderModel):
    """The encoder of XLNet: word embeddings, and layers with relative attention. The last token of a text is pooled.

    Unlike in transformers, the embeddings of distances have no dropout, because all rows share these embeddings.
    """

    config: XlnetConfig
    compute: Compute = Compute()

    def make_embeddings(self) -> nn.Module:
        """Returns the embeddings."""
        return XlnetEmbeddings(self.config, self.compute)

    def make_layers(self) -> nn.Module:
        """Returns the layers."""
        return XlnetEncoder(self.config, self.compute)

    def pooler_input(self, hidden: jax.Array, dropout_keys: jax.Array | None) -> jax.Array:
        """Returns the hidden states with dropout."""
        return self._dropped(hidden, dropout_keys, 0)

    def encode(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        positions: jax.Array | None = None,
        dropout_keys: jax.Array | None = None,
        *,
        every_layer: bool = False,
    ) -> jax.Array:
        """Returns hidden states, see `EncoderModel.encode`."""
        inputs = input_ids, segments, token_types
        return self.encode_permuted(*inputs, dropout_keys=dropout_keys, every_layer=every_layer)[0]

    def encode_words(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        places: jax.Array,
        positions: jax.Array | None = None,
        dropout_keys: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the hidden states of the second stream and their indices, see `EncoderModel.encode_words`.

        No state attends to the tokens at `places`.
        """
        is_hidden = (places[:, :, None] == jnp.arange(input_ids.shape[1])).any(1)
        inputs = input_ids, segments, token_types, places, ~is_hidden[:, None], positions, dropout_keys
        return self.encode_permuted(*inputs)[1], jnp.broadcast_to(jnp.arange(places.shape[1]), places.shape)

    def encode_permuted(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        places: jax.Array | None = None,
        seen: jax.Array | None = None,
        positions: jax.Array | None = None,
        dropout_keys: jax.Array | None = None,
        memory: RecurrentMemory | None = None,
        *,
        every_layer: bool = False,
    ) -> tuple[jax.Array, Any, RecurrentMemory | None]:
        """Returns the hidden states, those of the second stream or None, and the next memory or None.

        See also `EncoderModel.encode_permuted`.

        Args:
          input_ids: see `encode`.
          segments: see `encode`.
          token_types: see `encode`.
          places: `[batch, predictions]`, the positions of the second stream; None for no second stream.
          seen: booleans `[batch, length or 1, length]`: the other tokens that a position attends to; None for all
            tokens.
          positions: ignored, because attention depends on relative distances.
          dropout_keys: see `encode`.
          memory: hidden states of earlier tokens, or None. All positions see these tokens, which have the token type 0.
          every_layer: whether to return the hidden states of all layers, `[layers + 1, ...]`, the embeddings first.
        """
        length, memory_length = input_ids.shape[1], 0 if memory is None else memory.states.shape[2]
        keys = [fold_in(fold_in(dropout_keys, 0), stream) for stream in range(2)]
        x = dropout(self.embeddings(input_ids), self.config.hidden_dropout_prob, keys[0])
        mask, is_same = visible(segments), token_types[:, :, None] == token_types[:, None]
        is_same = jnp.concatenate([jnp.repeat(token_types[:, :, None] == 0, memory_length, axis=2), is_same], axis=2)
        is_seen = jnp.asarray(True) if seen is None else seen[:, None]
        is_self = jnp.eye(length, dtype=bool)

        def with_memory(mask: jax.Array) -> jax.Array:
            return mask if memory is None else memory.extend_mask(mask)

        streams, views = [x], [View(with_memory(mask & (is_seen | is_self)), is_same)]
        if places is not None:
            queries = jnp.broadcast_to(self.embeddings.query.astype(x.dtype), (*places.shape, x.shape[-1]))
            streams.append(dropout(queries, self.config.hidden_dropout_prob, keys[1]))
            mask_at_places = jnp.take_along_axis(mask & is_seen & ~is_self, places[:, None, :, None], axis=2)
            is_same_at_places = jnp.take_along_axis(is_same, places[:, :, None], axis=1)
            views.append(View(with_memory(mask_at_places), is_same_at_places, memory_length + places))
        inputs = tuple(nn.with_logical_constraint(stream, ("batch", "length", "embed")) for stream in streams)
        memory_states = None if memory is None else memory.by_layer()
        outputs, next_states = self.encoder(inputs, tuple(views), memory_states, dropout_keys, every_layer=every_layer)
        if every_layer:
            outputs = [jnp.concatenate([start[None], states]) for start, states in zip(inputs, outputs, strict=True)]
        next_memory = None if memory is None else memory.advance(next_states, length)
        queries_after = self._dropped(outputs[1], dropout_keys, 1) if places is not None else None
        return outputs[0], queries_after, next_memory

    def pool(self, hidden: jax.Array, segments: jax.Array, first_tokens: jax.Array | None) -> jax.Array:
        """Returns the pooled output of the last token of each example."""
        return self.pooler(hidden, last_tokens(segments, first_tokens))

    def _dropped(self, hidden: jax.Array, dropout_keys: jax.Array | None, site: int) -> jax.Array:
        """Applies the dropout that transformers has after the last layer."""
        keys = fold_in(
            fold_in(dropout_keys, self.config.num_hidden_layers + 1), site
        )  # see `TransformerModel.pooler_input`
        return dropout(hidden, self.config.hidden_dropout_prob, keys)

    @nn.nowrap
    def attention_probabilities(
        self, params: dict, ids: jax.Array, segments: jax.Array, token_types: jax.Array
    ) -> jax.Array:
        """Returns attention probabilities `[layers, heads, queries, keys]`, see `ExposesAttention`."""
        inputs = layer_inputs(self, params, ids, segments, token_types)
        key_distances = relative_attention.distances(ids.shape[1], ids.shape[1], is_causal=False)
        is_same, layers = token_types[:, :, None] == token_types[:, None], params["encoder"]["layers"]
        return relative_attention.layer_probabilities(
            self.config, layers, inputs, key_distances, visible(segments), is_same=is_same
        )


class XlnetEmbeddings(nn.Module):
    """Word embeddings, and `query`, the vector that initializes all hidden states of the second stream."""

    config: XlnetConfig
    compute: Compute

    def setup(self) -> None:
        """Builds the submodules."""
        self.word = Embedding(self.config, self.compute.dtype, self.config.padded_vocab_size, "vocab")
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        self.query = self.param("query", nn.with_logical_partitioning(init, ("embed",)), (self.config.hidden_size,))

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        """Embeds token ids: `[batch, length]` -> `[batch, length, hidden]`."""
        return self.word(input_ids)


class XlnetEncoder(nn.Module):
    """The layers of XLNet, as a scan over stacked params."""

    config: XlnetConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        streams: tuple[jax.Array, ...],
        views: tuple[View, ...],
        memory: jax.Array | None = None,
        dropout_keys: jax.Array | None = None,
        *,
        every_layer: bool = False,
    ) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Returns the streams after the last layer, and with `memory` the `last_states` of all layers, else None.

        Args:
          streams: the hidden states `[batch, length, hidden]`, and optionally the second stream.
          views: the view of each stream.
          memory: `[layers, batch, memory, hidden]`, or None.
          dropout_keys: `[batch]`, or None.
          every_layer: whether to return the streams after all layers, `[layers, ...]`.
        """
        config, compute = self.config, self.compute
        length, keys = streams[0].shape[1], views[0].mask.shape[-1]
        embedded_distances = relative_attention.distance_embeddings(
            relative_attention.distances(length, keys, is_causal=False), config.hidden_size
        )
        in_axes, trains = (0, 0, *[nn.broadcast] * 3), dropout_keys is not None
        make = scan_layers(recomputed(XlnetLayer, compute), config.num_hidden_layers, in_axes, compute, trains)
        numbers = 1 + jnp.arange(config.num_hidden_layers)
        layers = make(config, compute, every_layer, name="layers")
        last, (states, next_states) = layers(streams, numbers, memory, embedded_distances, views, dropout_keys)
        return states if every_layer else last, next_states


class XlnetLayer(nn.Module):
    """Attention of all streams to the hidden states, and a feed-forward network (post-norm).

    Dropout, a residual connection and a LayerNorm follow the attention and the feed-forward network.
    """

    config: XlnetConfig
    compute: Compute
    every_layer: bool = False  # whether the scan also returns the streams of this layer

    @nn.compact
    def __call__(
        self,
        streams: tuple[jax.Array, ...],
        number: jax.Array,
        memory: jax.Array | None,
        embedded_distances: jax.Array,
        views: tuple[View, ...],
        dropout_keys: jax.Array | None,
    ) -> tuple[tuple[jax.Array, ...], tuple[Any, jax.Array | None]]:
        """Returns the streams after layer `number`; and the outputs of the scan: (streams or None, `last_states`).

        Args:
          streams: see `XlnetEncoder`.
          number: the number of the layer, from 1.
          memory: hidden states of earlier tokens `[batch, memory, hidden]`, or None.
          embedded_distances: `distance_embeddings` `[distances, hidden]`.
          views: see `XlnetEncoder`.
          dropout_keys: `[batch]`, or None.
        """
        config, compute, rate = self.config, self.compute, self.config.hidden_dropout_prob
        hidden, wide = (config.hidden_size,), (config.intermediate_size,)
        attention = relative_attention.RelativeAttention(config, compute, name="attention")
        biases = relative_attention.RelativeBiases(config, name="biases")()
        segment_bias, segment_embedding = self._segment_params()
        attention_norm = layer_norm(config, compute, "attention_norm")
        output_norm = layer_norm(config, compute, "output_norm")
        intermediate = Dense(config, compute, hidden, wide, ("embed", "mlp"), name="intermediate")
        output = Dense(config, compute, wide, hidden, ("mlp", "embed"), name="output")

        layer_keys = fold_in(dropout_keys, number)
        next_states, context = None, streams[0]
        if memory is not None:
            next_states = last_states(memory, context)
            context = jnp.concatenate([memory.astype(context.dtype), context], axis=1)
        read = attention.read(context, embedded_distances, fold_in(layer_keys, len(views)))

        def apply(x: jax.Array, view: View, stream_keys: jax.Array | None) -> jax.Array:
            keys = [fold_in(stream_keys, site) for site in range(4)]
            segments = relative_attention.SegmentTerm(segment_bias, segment_embedding, view.is_same)
            attended = attention(x, read, biases, view.mask, keys[0], segments, view.places)
            x = attention_norm.of_sum(x, attended, None, keys[1], rate)
            inner = activate(intermediate(x, keys[2]), config.hidden_act, compute)
            inner = nn.with_logical_constraint(inner, ("batch", "length", "mlp"))
            inner = dropout(inner, rate, keys[2])
            x = output_norm.of_sum(x, output.product(inner, keys[3]), output.bias, keys[3], rate)
            return nn.with_logical_constraint(x, ("batch", "length", "embed"))

        outputs = tuple(
            apply(x, view, fold_in(layer_keys, stream))
            for stream, (x, view) in enumerate(zip(streams, views, strict=True))
        )
        return outputs, (outputs if self.every_layer else None, next_states)

    def _segment_params(self) -> tuple[Any, Any]:
        """Returns the bias and the embedding of `SegmentTerm`."""
        by_head = self.config.num_attention_heads, self.config.head_size
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        bias = self.param("segment_bias", nn.with_logical_partitioning(init, ("heads", "kv")), by_head)
        type_init = nn.with_logical_partitioning(init, (None, "heads", "kv"))
        return bias, self.param("segment_embedding", type_init, (2, *by_head))
