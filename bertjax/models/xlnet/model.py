"""The modules of XLNet."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.models.xlnet.config import XlnetConfig
from bertjax.nn.attention import Dense, LayerNorm
from bertjax.nn.encoder import Embedding, activate, recomputed, stacked
from bertjax.nn.encoder_model import EncoderModel
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.plain_attention import visible
from bertjax.nn.ops.recurrent_memory import last_states
from bertjax.nn.ops.segments import last_tokens
from bertjax.nn.relative_attention import (
    Biases,
    RelativeAttention,
    RelativeBiases,
    SegmentTerm,
    distance_embeddings,
    distances,
    probabilities,
)


class View(NamedTuple):
    """What a stream of states sees.

    Attributes:
      mask: `[batch, 1, states, keys]` booleans.
      is_same: `[batch, states, keys]` booleans: whether the key's token is of the state's own type.
      places: `[batch, states]` where the states stand among the keys; None: they are the last ones.
    """

    mask: jax.Array
    is_same: jax.Array
    places: jax.Array | None = None


class XlnetModel(EncoderModel):
    """Word embeddings, and layers that know tokens' places by their distances only.

    A text is pooled at its last token. There is no dropout of the distances' embeddings, which transformers has: they
    are the same for all rows here.
    """

    config: XlnetConfig
    compute: Compute = Compute()

    def setup(self):
        self.embeddings = XlnetEmbeddings(self.config, self.compute)
        self.encoder = XlnetEncoder(self.config, self.compute)
        self.pooler = self.make_pooler()

    def __call__(self, input_ids, segments, token_types, positions=None, dropout_keys=None, first_tokens=None):
        """As `EncoderModel.__call__`; what the pooler reads has dropout."""
        hidden = self.encode(input_ids, segments, token_types, positions, dropout_keys=dropout_keys)
        return hidden, self.pool(self._dropped(hidden, dropout_keys, 0), segments, first_tokens)

    def encode(self, input_ids, segments, token_types, positions=None, dropout_keys=None, *, every_layer: bool = False):
        """As `EncoderModel.encode`."""
        del positions
        return self.read(input_ids, segments, token_types, dropout_keys, every_layer=every_layer)[0]

    def encode_words(self, input_ids, segments, token_types, places, positions=None, dropout_keys=None):
        """As `EncoderModel.encode_words`: no state has seen the tokens at any of these places."""
        is_hidden = (places[:, :, None] == jnp.arange(input_ids.shape[1])).any(1)
        given = input_ids, segments, token_types, places, ~is_hidden[:, None], positions, dropout_keys
        return self.encode_permuted(*given)[1], jnp.broadcast_to(jnp.arange(places.shape[1]), places.shape)

    def encode_permuted(
        self, input_ids, segments, token_types, places, seen, positions=None, dropout_keys=None, memory=None
    ):
        """As `EncoderModel.encode_permuted`."""
        del positions
        given = input_ids, segments, token_types, dropout_keys
        hidden, found, memory = self.read(*given, seen=seen, places=places, memory=memory)
        return hidden, self._dropped(found, dropout_keys, 1), memory

    def read(
        self, input_ids, segments, token_types, dropout_keys=None, *,
        seen=None, places=None, memory=None, every_layer: bool = False,
    ):  # fmt: skip
        """Returns the hidden states; those at `places`, which have not seen the tokens there; what the memory then is.

        The last two are None where there is none. With `every_layer` states are of each layer, `[layers + 1, ...]`, the
        embeddings first.

        Args:
          input_ids, segments, token_types, dropout_keys: as in `EncoderModel.encode`.
          seen: `[batch, length or 1, length]` booleans: which tokens a place sees, besides its own; None: all.
          places: `[batch, predictions]`.
          memory: what each layer reads of tokens before the row, which all see, and which count as of type 0: the
            hidden states of a row before, but for the last layer's.
        """  # fmt: skip
        length, kept = input_ids.shape[1], 0 if memory is None else memory.states.shape[2]
        keys = [fold_in(fold_in(dropout_keys, 0), stream) for stream in range(2)]
        x = dropout(self.embeddings(input_ids), self.config.hidden_dropout_prob, keys[0])
        mask, is_same = visible(segments), token_types[:, :, None] == token_types[:, None]
        is_same = jnp.concatenate([jnp.repeat(token_types[:, :, None] == 0, kept, axis=2), is_same], axis=2)
        seen, own = True if seen is None else seen[:, None], jnp.eye(length, dtype=bool)

        def behind_memory(mask):
            return mask if memory is None else memory.seen_with(mask)

        streams, views = [x], [View(behind_memory(mask & (seen | own)), is_same)]
        if places is not None:
            start = jnp.broadcast_to(self.embeddings.query.astype(x.dtype), (*places.shape, x.shape[-1]))
            streams.append(dropout(start, self.config.hidden_dropout_prob, keys[1]))
            at_places = jnp.take_along_axis(mask & seen & ~own, places[:, None, :, None], axis=2)
            of_places = jnp.take_along_axis(is_same, places[:, :, None], axis=1)
            views.append(View(behind_memory(at_places), of_places, kept + places))
        streams = tuple(nn.with_logical_constraint(each, ("batch", "length", "embed")) for each in streams)
        remembered = None if memory is None else memory.by_layer()
        found, left = self.encoder(streams, tuple(views), remembered, dropout_keys, every_layer=every_layer)
        if every_layer:
            found = [jnp.concatenate([first[None], each]) for first, each in zip(streams, found)]
        after = None if memory is None else memory.after(left, length)
        return found[0], found[1] if places is not None else None, after

    def pool(self, hidden, segments, first_tokens):
        return self.pooler(hidden, last_tokens(segments, first_tokens))

    def _dropped(self, hidden, dropout_keys, site: int):
        """Applies the dropout that transformers has after the last layer."""
        keys = fold_in(fold_in(dropout_keys, self.config.num_hidden_layers + 1), site)  # see RobertaModel
        return dropout(hidden, self.config.hidden_dropout_prob, keys)


class XlnetEmbeddings(nn.Module):
    """Word embeddings, and `query`, what the states that predict words begin with."""

    config: XlnetConfig
    compute: Compute

    def setup(self):
        self.word = Embedding(self.config, self.compute.dtype, self.config.padded_vocab_size, "vocab")
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        self.query = self.param("query", nn.with_logical_partitioning(init, ("embed",)), (self.config.hidden_size,))

    def __call__(self, input_ids):
        return self.word(input_ids)


class XlnetEncoder(nn.Module):
    """The layers, a scan whose params are stacked."""

    config: XlnetConfig
    compute: Compute

    @nn.compact
    def __call__(
        self, streams: tuple, views: tuple, memory=None, dropout_keys=None, *, every_layer: bool = False
    ) -> tuple:
        """Returns the streams after the last layer, or with `every_layer` after each, `[layers, ...]`; and what of the
        memory and of the tokens each layer leaves for the next row, `[layers, batch, tokens, hidden]`, or None.

        Args:
          streams: the content of tokens `[batch, length, hidden]`, and states that predict words, if any.
          views: what these see.
          memory: `[layers, batch, tokens, hidden]`, or None.
        """
        config, compute = self.config, self.compute
        length, keys = streams[0].shape[1], views[0].mask.shape[-1]
        embedded = distance_embeddings(distances(length, keys, is_causal=False), config.hidden_size)
        in_axes, trains = (0, 0, *[nn.broadcast] * 3), dropout_keys is not None
        make = stacked(recomputed(XlnetLayer, compute), config.num_hidden_layers, in_axes, compute, trains)
        numbers = 1 + jnp.arange(config.num_hidden_layers)
        layers = make(config, compute, every_layer, name="layers")
        last, (each, left) = layers(streams, numbers, memory, embedded, views, dropout_keys)
        return each if every_layer else last, left


class XlnetLayer(nn.Module):
    """Attention of each stream to the content of tokens, and a feed-forward network, each followed by dropout, residual
    sum and LayerNorm."""

    config: XlnetConfig
    compute: Compute
    every_layer: bool = False  # also return the streams as an output of the scan

    @nn.compact
    def __call__(self, streams: tuple, number, memory, embedded, views: tuple[View, ...], dropout_keys):
        config, compute = self.config, self.compute
        hidden, wide = (config.hidden_size,), (config.intermediate_size,)
        attention = RelativeAttention(config, compute, name="attention")
        biases, term = RelativeBiases(config, name="biases")(), self._segments()
        attention_norm, output_norm = (
            LayerNorm(config, compute, name=name) for name in ("attention_norm", "output_norm")
        )
        intermediate = Dense(config, compute, hidden, wide, ("embed", "mlp"), name="intermediate")
        output = Dense(config, compute, wide, hidden, ("mlp", "embed"), name="output")

        of_layer = fold_in(dropout_keys, number)
        left, content = None, streams[0]
        if memory is not None:
            left, content = last_states(memory, content), jnp.concatenate([memory.astype(content.dtype), content], 1)
        read = attention.read(content, embedded, fold_in(of_layer, len(views)))

        def advanced(x, view: View, keys):
            keys = [fold_in(keys, site) for site in range(4)]
            segments = SegmentTerm(*term, view.is_same)
            attended = attention(x, read, biases, view.mask, keys[0], segments, view.places)
            x = attention_norm.of_sum(x, attended, None, keys[1])
            inner = activate(intermediate(x, keys[2]), config.hidden_act, compute)
            inner = nn.with_logical_constraint(inner, ("batch", "length", "mlp"))
            inner = dropout(inner, config.hidden_dropout_prob, keys[2])
            x = output_norm.of_sum(x, output.product(inner, keys[3]), output.bias, keys[3])
            return nn.with_logical_constraint(x, ("batch", "length", "embed"))

        found = tuple(
            advanced(x, view, fold_in(of_layer, number)) for number, (x, view) in enumerate(zip(streams, views))
        )
        return found, (found if self.every_layer else None, left)

    def _segments(self):
        """Returns the bias and the embedding of `SegmentTerm`."""
        by_head = self.config.num_attention_heads, self.config.head_size
        init = nn.initializers.truncated_normal(self.config.initializer_range)
        shapes = {
            "segment_bias": (by_head, ("heads", "kv")),
            "segment_embedding": ((2, *by_head), (None, "heads", "kv")),
        }
        return [
            self.param(name, nn.with_logical_partitioning(init, axes), shape) for name, (shape, axes) in shapes.items()
        ]


def attention_probabilities(
    config: XlnetConfig, params: dict, ids: jax.Array, segments: jax.Array, token_types: jax.Array
) -> jax.Array:
    """Returns what each head of each layer attends to in a text: `[layers, heads, queries, keys]`."""
    inputs = (ids, segments, token_types)
    states = XlnetModel(config).apply({"params": params}, *inputs, every_layer=True, method="encode")
    length, is_same, mask = ids.shape[1], token_types[:, :, None] == token_types[:, None], visible(segments)
    embedded = distance_embeddings(distances(length, length, is_causal=False), config.hidden_size)

    def of_layer(layer, x):
        attention = RelativeAttention(config, Compute()).bind({"params": layer["attention"]})
        term = SegmentTerm(layer["segment_bias"], layer["segment_embedding"], is_same)
        return probabilities(attention.query(x), attention.read(x, embedded), Biases(**layer["biases"]), mask, term)[0]

    return jax.lax.map(lambda each: of_layer(*each), (params["encoder"]["layers"], states[:-1]))
