"""The modules of Transformer-XL."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.models.transformer_xl.config import TransformerXLConfig
from bertjax.nn.attention import Dense, LayerNorm
from bertjax.nn.encoder import Embedding, activate, recomputed, stacked
from bertjax.nn.encoder_model import EncoderModel
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
    probabilities,
)

SITES = 4  # places in a layer that have dropout


class TransformerXLModel(EncoderModel):
    """Word embeddings and layers. A text is pooled at its last token, which alone sees all of it.

    Token types and positions have no effect: attention sees distances.
    """

    config: TransformerXLConfig
    compute: Compute = Compute()

    def setup(self):
        self.embeddings = ScaledEmbeddings(self.config, self.compute)
        self.encoder = TransformerXLEncoder(self.config, self.compute)
        self.pooler = self.make_pooler()

    def encode(
        self,
        input_ids,
        segments,
        token_types,
        positions=None,
        dropout_keys=None,
        *,
        every_layer: bool = False,
        memory: Memory | None = None,
    ):
        """As `EncoderModel.encode`; with a memory also returns what it then is."""
        del token_types, positions
        x = self.embeddings(input_ids, fold_in(dropout_keys, 0))
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        hidden, memory = self.encoder(x, segments, dropout_keys, every_layer=every_layer, memory=memory)
        hidden = jnp.concatenate([x[None], hidden]) if every_layer else hidden
        return hidden if memory is None else (hidden, memory)

    def decode(self, input_ids, positions, cache: Cache):
        """As `models.bert.model.BertModel.decode`. A token sees as many before it as the memory has."""
        return self.encoder(self.embeddings(input_ids), positions, cache=cache)

    def pool(self, hidden, segments, first_tokens):
        return self.pooler(hidden, last_tokens(segments, first_tokens))


class ScaledEmbeddings(nn.Module):
    """Word embeddings times the root of their size, and dropout."""

    config: TransformerXLConfig
    compute: Compute

    def setup(self):
        self.word = Embedding(self.config, self.compute.dtype, self.config.padded_vocab_size, "vocab")

    def __call__(self, input_ids, dropout_keys=None):
        config = self.config
        return dropout(self.word(input_ids) * config.embedding_size**0.5, config.hidden_dropout_prob, dropout_keys)


class TransformerXLEncoder(nn.Module):
    """The layers, a scan whose params are stacked, and the dropout of what they give."""

    config: TransformerXLConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        x,
        segments,
        dropout_keys=None,
        *,
        every_layer: bool = False,
        cache: Cache | None = None,
        memory: Memory | None = None,
    ):
        """The last layer's `[batch, length, hidden]`, or with `every_layer` all `[layers, batch, length, hidden]`; and
        what the cache or the memory then is, if there is one.

        With a cache, `segments` are the places of the tokens in it `[length]`, one after the other.
        """
        config, compute, length = self.config, self.compute, x.shape[1]
        count, places, remembered = config.num_hidden_layers, None, None
        if cache is not None:
            places, keys = segments, cache.keys.shape[2]
            apart = places[-1] - jnp.arange(keys)  # like `distances`; the tokens need not be the cache's last
            before = places[:, None] - jnp.arange(keys)
            mask = ((before >= 0) & (before <= config.memory_length))[None, None]
        else:
            mask = visible(segments, causal=True)
            if memory is not None:
                mask, remembered = memory.seen_with(mask), memory.by_layer()
            apart = distances(length, mask.shape[-1], is_causal=True)
        if config.clamp_length:
            apart = jnp.minimum(apart, config.clamp_length)
        embedded = distance_embeddings(apart, config.hidden_size)
        biases = None if config.untie_biases else RelativeBiases(config, name="biases")()

        in_axes = (0, 0, 0, *[nn.broadcast] * 5)
        make = stacked(recomputed(TransformerXLLayer, compute), count, in_axes, compute, dropout_keys is not None)
        numbers = jnp.arange(1, count + 1)  # 0 is the embeddings' dropout
        layers = make(config, compute, every_layer, name="layers")
        last, (each, kept) = layers(x, numbers, cache, remembered, places, embedded, biases, mask, dropout_keys)
        last = dropout(last, config.hidden_dropout_prob, fold_in(fold_in(dropout_keys, count), SITES))
        left = kept if memory is None else memory.after(kept, length)
        return each.at[-1].set(last) if every_layer else last, left


class TransformerXLLayer(nn.Module):
    """Attention and a two-layer feed-forward network, each followed by dropout, residual sum and LayerNorm.

    There is dropout within the feed-forward network as well, as in the paper's code.
    """

    config: TransformerXLConfig
    compute: Compute
    every_layer: bool = False  # also return x as an output of the scan

    @nn.compact
    def __call__(self, x, number, cache, memory, places, embedded, biases, mask, dropout_keys):
        config, compute, rate = self.config, self.compute, self.config.hidden_dropout_prob
        keys = [fold_in(fold_in(dropout_keys, number), site) for site in range(SITES)]
        hidden, wide = (config.hidden_size,), (config.intermediate_size,)
        biases = RelativeBiases(config, name="biases")() if biases is None else biases

        attention = RelativeAttention(config, compute, name="attention")
        kept, whole = None, x
        if memory is not None:
            kept, whole = last_states(memory, x), jnp.concatenate([memory.astype(x.dtype), x], axis=1)
        read = attention.read(whole, embedded, keys[0])
        if cache is not None:
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
    """Returns what each head of each layer attends to in a text: `[layers, heads, queries, keys]`."""
    inputs, length = (ids, segments, jnp.zeros_like(ids)), ids.shape[1]
    states = TransformerXLModel(config).apply({"params": params}, *inputs, every_layer=True, method="encode")
    apart = distances(length, length, is_causal=True)
    apart = jnp.minimum(apart, config.clamp_length) if config.clamp_length else apart
    embedded = distance_embeddings(apart, config.hidden_size)
    tied, mask = params["encoder"].get("biases"), visible(segments, causal=True)
    attention = RelativeAttention(config, Compute())

    def of_layer(layer, x):
        bound = attention.bind({"params": layer["attention"]})
        biases = Biases(**layer.get("biases", tied))
        return probabilities(bound.query(x), bound.read(x, embedded), biases, mask)[0]

    layers = params["encoder"]["layers"]
    return jax.lax.map(lambda each: of_layer(*each), (layers, states[:-1]))
