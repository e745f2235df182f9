"""The modules of EuroBERT."""

from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.models.eurobert.config import EuroBertConfig
from bertjax.nn.attention import Dense, RMSNorm
from bertjax.nn.encoder import ACTIVATIONS, Embedding, activate, recomputed, scan_layers
from bertjax.nn.encoder_model import RotaryModel, layer_inputs
from bertjax.nn.ops.dropout import fold_in
from bertjax.nn.ops.plain_attention import visible
from bertjax.nn.ops.rotary import Rotation, rotate, rotation
from bertjax.nn.ops.segments import mean_of_segments
from bertjax.nn.rotary_attention import GroupedAttention, joined


class EuroBertModel(RotaryModel):
    """The encoder of EuroBERT, with a dense layer for sequence classification as its pooler."""

    config: EuroBertConfig
    compute: Compute = Compute()

    def make_embeddings(self) -> nn.Module:
        """Returns the embeddings."""
        return WordEmbeddings(self.config, self.compute)

    def make_layers(self) -> nn.Module:
        """Returns the layers."""
        return EuroBertEncoder(self.config, self.compute)

    def make_pooler(self) -> nn.Module:
        """Returns the pooler."""
        return EuroBertPooler(self.config, self.compute)

    def pool(self, hidden: jax.Array, segments: jax.Array, first_tokens: jax.Array | None) -> jax.Array:
        """Returns the pooled output, see `classifier_pooling` in the config.

        With "late", transformers averages the logits of all tokens. The logits of the mean are the same.
        """
        tokens = jnp.zeros((hidden.shape[0], 1), jnp.int32) if first_tokens is None else first_tokens
        if self.config.classifier_pooling == "late":
            pooled = mean_of_segments(self.pooler(hidden), segments, tokens)
        elif self.config.classifier_pooling == "mean":
            pooled = self.pooler(mean_of_segments(hidden, segments, tokens))
        else:
            pooled = self.pooler(jnp.take_along_axis(hidden, tokens[..., None], axis=1))
        return pooled[:, 0] if first_tokens is None else pooled

    @nn.nowrap
    def attention_probabilities(
        self, params: dict, ids: jax.Array, segments: jax.Array, token_types: jax.Array
    ) -> jax.Array:
        """Returns attention probabilities `[layers, heads, queries, keys]`, see `ExposesAttention`."""
        config, inputs = self.config, layer_inputs(self, params, ids, segments, token_types)
        angles = rotation(jnp.arange(ids.shape[1])[None], config.head_size, config.rope_theta)
        mask = visible(segments)[0]

        def of_layer(layer: dict, x: jax.Array) -> jax.Array:
            normed = cast(jax.Array, RMSNorm(config, Compute()).apply({"params": layer["attention_norm"]}, x))
            kernel = joined(layer["attention"]["query"]["kernel"], layer["attention"]["key_value"]["kernel"])
            query, key, _ = jnp.moveaxis(rotate(jnp.einsum("blh,hpnd->blpnd", normed, kernel), angles)[0], 1, 0)
            scores = jnp.einsum("qnd,knd->nqk", query, key) / config.head_size**0.5
            return nn.softmax(jnp.where(mask, scores, -jnp.inf))

        return jax.lax.map(lambda layer_and_x: of_layer(*layer_and_x), (params["encoder"]["layers"], inputs))


class WordEmbeddings(nn.Module):
    """Word embeddings."""

    config: EuroBertConfig
    compute: Compute

    def setup(self) -> None:
        """Builds the submodules."""
        self.word = Embedding(self.config, self.compute.dtype, self.config.padded_vocab_size, "vocab")

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        """Embeds token ids: `[batch, length]` -> `[batch, length, hidden]`."""
        return self.word(input_ids)


class EuroBertPooler(nn.Module):
    """A dense layer with a bias, and GELU."""

    config: EuroBertConfig
    compute: Compute

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Maps hidden states `[..., hidden]` to the same shape."""
        size = (self.config.hidden_size,)
        return ACTIVATIONS["gelu"](Dense(self.config, self.compute, size, size, ("embed", None), name="dense")(hidden))


class EuroBertEncoder(nn.Module):
    """The layers of EuroBERT, as a scan over stacked params, and a final RMSNorm."""

    config: EuroBertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        dropout_keys: jax.Array | None = None,
        *,
        every_layer: bool = False,
    ) -> jax.Array:
        """Returns hidden states, see `EncoderModel.make_layers`. Only LoRA uses `dropout_keys`."""
        config, compute = self.config, self.compute
        angles = rotation(positions, config.head_size, config.rope_theta)
        in_axes, trains = (0, nn.broadcast, nn.broadcast, nn.broadcast), dropout_keys is not None
        make = scan_layers(recomputed(EuroBertLayer, compute), config.num_hidden_layers, in_axes, compute, trains)
        numbers = 1 + jnp.arange(config.num_hidden_layers)
        last, states = make(config, compute, every_layer, name="layers")(x, numbers, angles, segments, dropout_keys)
        last = RMSNorm(config, compute, name="norm")(last)
        return states.at[-1].set(last) if every_layer else last


class EuroBertLayer(nn.Module):
    """A pre-norm layer: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    config: EuroBertConfig
    compute: Compute
    every_layer: bool = False  # whether the scan also returns the output of this layer

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        number: jax.Array,
        angles: Rotation,
        segments: jax.Array,
        dropout_keys: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns x `[batch, length, hidden]` after layer `number`; and x or None as the output of the scan."""
        config, compute, keys = self.config, self.compute, fold_in(dropout_keys, number)
        hidden, wide = (config.hidden_size,), (config.intermediate_size,)
        normed = RMSNorm(config, compute, name="attention_norm")(x)
        x = x + GroupedAttention(config, compute, name="attention")(normed, angles, segments, keys)

        normed = RMSNorm(config, compute, name="output_norm")(x)
        axes = ("embed", "projections", "mlp")
        inner = Dense(config, compute, hidden, (2, *wide), axes, use_bias=False, name="input")(normed, keys)
        inner = nn.with_logical_constraint(activate(inner, config.hidden_act, compute), ("batch", "length", "mlp"))
        x = x + Dense(config, compute, wide, hidden, ("mlp", "embed"), use_bias=False, name="output")(inner, keys)
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        return x, (x if self.every_layer else None)
