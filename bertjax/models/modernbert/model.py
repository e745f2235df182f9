"""The modules of ModernBERT."""

import functools
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.models.modernbert.config import ModernBertConfig
from bertjax.nn.attention import Dense, LayerNorm
from bertjax.nn.encoder import ACTIVATIONS, Embedding, activate, recomputed, scan_layers
from bertjax.nn.encoder_model import RotaryModel, layer_inputs
from bertjax.nn.kernels.flash_attention import can_flash, flash_attention
from bertjax.nn.kernels.pallas import has_kernels
from bertjax.nn.ops.dropout import fold_in
from bertjax.nn.ops.plain_attention import visible
from bertjax.nn.ops.rotary import Rotation, rotate, rotation
from bertjax.nn.ops.segments import mean_of_segments
from bertjax.nn.rotary_attention import attend_rotary


class ModernBertModel(RotaryModel):
    """The encoder of ModernBERT, with the prediction head of transformers as its pooler."""

    config: ModernBertConfig
    compute: Compute = Compute()

    def make_embeddings(self) -> nn.Module:
        """Returns the embeddings."""
        return ModernBertEmbeddings(self.config, self.compute)

    def make_layers(self) -> nn.Module:
        """Returns the layers."""
        return ModernBertEncoder(self.config, self.compute)

    def make_pooler(self) -> nn.Module:
        """Returns the pooler."""
        return PredictionHead(self.config, self.compute)

    def pool(self, hidden: jax.Array, segments: jax.Array, first_tokens: jax.Array | None) -> jax.Array:
        """Applies the pooler to the state of the first token, or to the mean state, see `classifier_pooling`."""
        tokens = jnp.zeros((hidden.shape[0], 1), jnp.int32) if first_tokens is None else first_tokens
        if self.config.classifier_pooling == "mean":
            pooled = mean_of_segments(hidden, segments, tokens)
        else:
            pooled = jnp.take_along_axis(hidden, tokens[..., None], axis=1)
        pooled = self.pooler(pooled)
        return pooled[:, 0] if first_tokens is None else pooled

    def token_states(self, hidden: jax.Array) -> jax.Array:
        """Returns the input of a token classifier `[batch, length, hidden]`: the pooler's output for all tokens."""
        return self.pooler(hidden)

    @nn.nowrap
    def attention_probabilities(
        self, params: dict, ids: jax.Array, segments: jax.Array, token_types: jax.Array
    ) -> jax.Array:
        """Returns attention probabilities `[layers, heads, queries, keys]`, see `ExposesAttention`."""
        config, inputs = self.config, layer_inputs(self, params, ids, segments, token_types)
        positions, probabilities = jnp.arange(ids.shape[1])[None], []
        for number, (layer, x) in enumerate(zip(layers_of(params["encoder"], config), inputs, strict=True)):
            if "attention_norm" in layer:
                norm = LayerNorm(config, Compute(), config.bias)
                x = norm.apply({"params": layer["attention_norm"]}, x)
            project = layer["attention"]["query_key_value"]
            projected = jnp.einsum("blh,hpnd->blpnd", x, project["kernel"]) + project.get("bias", 0.0)
            is_global = config.is_global(number)
            theta = config.global_rope_theta if is_global else config.local_rope_theta
            query, key, _ = jnp.moveaxis(rotate(projected, rotation(positions, config.head_size, theta))[0], 1, 0)
            scores = jnp.einsum("qnd,knd->nqk", query, key) / config.head_size**0.5
            mask = visible(segments, window=None if is_global else config.window)[0]
            probabilities.append(nn.softmax(jnp.where(mask, scores, -jnp.inf)))
        return jnp.stack(probabilities)


class ModernBertEmbeddings(nn.Module):
    """Word embeddings, a LayerNorm, and a projection if the hidden size differs from the embedding size."""

    config: ModernBertConfig
    compute: Compute

    def setup(self) -> None:
        """Builds the submodules."""
        self.word = Embedding(self.config, self.compute.dtype, self.config.padded_vocab_size, "vocab")
        size, hidden = self.config.embedding_size, self.config.hidden_size
        self.norm = LayerNorm(self.config, self.compute, self.config.bias, size)
        if size != hidden:
            axes = ("embed", None)
            self.projection = Dense(self.config, self.compute, (size,), (hidden,), axes, self.config.bias)

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        """Embeds token ids: `[batch, length]` -> `[batch, length, hidden]`."""
        x = self.norm(self.word(input_ids))
        return x if self.config.embedding_size == self.config.hidden_size else self.projection(x)


class PredictionHead(nn.Module):
    """A dense layer, an activation and a LayerNorm."""

    config: ModernBertConfig
    compute: Compute

    @nn.compact
    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Maps hidden states `[..., hidden]` to the same shape."""
        config, size = self.config, hidden.shape[-1:]
        scale = config.output_init_scale
        x = Dense(config, self.compute, size, size, ("embed", None), config.bias, scale, name="dense")(hidden)
        return LayerNorm(config, self.compute, config.bias, name="norm")(ACTIVATIONS[config.hidden_act](x))


class ModernBertEncoder(nn.Module):
    """The layers of ModernBERT and a final LayerNorm.

    The first layer is global and has no norm before attention. The next layers form groups of local layers and then a
    global layer. A scan runs over the groups. The local layers after the last group have the name `rest`.
    """

    config: ModernBertConfig
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
        """Returns hidden states, see `EncoderModel.make_layers`."""
        config, compute = self.config, self.compute
        angles = {
            theta: rotation(positions, config.head_size, theta)
            for theta in (config.global_rope_theta, config.local_rope_theta)
        }
        rotations = angles[config.global_rope_theta], angles[config.local_rope_theta]
        period, layers = config.global_attn_every_n_layers, config.num_hidden_layers
        count, remaining = divmod(layers - 1, period)
        arguments = (rotations, segments, dropout_keys)

        x = _layer(config, compute, is_global=True, has_norm=False, name="first")(x, 0, *arguments)
        states: list[Any] = [x[None]]
        if count:
            in_axes = (0, nn.broadcast, nn.broadcast, nn.broadcast)
            make = scan_layers(LayerGroup, count, in_axes, compute, dropout_keys is not None)
            groups = make(config, compute, period, every_layer, name="groups")
            x, group_states = groups(x, 1 + period * jnp.arange(count), *arguments)
            states.append(group_states.reshape(-1, *x.shape) if every_layer else group_states)
        if remaining:
            x, rest_states = LayerGroup(config, compute, remaining, every_layer, name="rest")(
                x, layers - remaining, *arguments
            )
            states.append(rest_states)
        last = LayerNorm(config, compute, config.bias, name="norm")(x)
        return jnp.concatenate(states).at[-1].set(last) if every_layer else last


class LayerGroup(nn.Module):
    """Consecutive layers after a global layer. The last layer of a complete group is global."""

    config: ModernBertConfig
    compute: Compute
    layers: int
    every_layer: bool = False

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        number: jax.Array | int,
        rotations: tuple[Rotation, Rotation],
        segments: jax.Array,
        dropout_keys: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns x after the layers, and with `every_layer` the hidden states of all layers `[layers, ...]`.

        Args:
          x: `[batch, length, hidden]`.
          number: the number of the first layer, from 0 in the encoder.
          rotations: the rotary angles of global layers, and of local layers.
          segments: `[batch, length]`.
          dropout_keys: `[batch]`, or None.
        """
        states = []
        for layer in range(self.layers):
            is_global = self.config.is_global(1 + layer)
            apply_layer = _layer(self.config, self.compute, is_global, has_norm=True, name=f"layer_{layer}")
            x = apply_layer(x, number + layer, rotations, segments, dropout_keys)
            states.append(x)
        return x, (jnp.stack(states) if self.every_layer else None)


def _layer(config: ModernBertConfig, compute: Compute, is_global: bool, has_norm: bool, name: str) -> nn.Module:
    return recomputed(Layer, compute)(config, compute, is_global, has_norm, name=name)


class Layer(nn.Module):
    """A pre-norm layer: x + attention(norm(x)), then x + feed-forward(norm(x)). Only attention has dropout."""

    config: ModernBertConfig
    compute: Compute
    is_global: bool
    has_norm: bool

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        number: jax.Array | int,
        rotations: tuple[Rotation, Rotation],
        segments: jax.Array,
        dropout_keys: jax.Array | None,
    ) -> jax.Array:
        """Returns x after layer `number`; arguments as in `LayerGroup`."""
        config, compute = self.config, self.compute
        hidden, wide, scale = (config.hidden_size,), (config.intermediate_size,), config.output_init_scale
        norm = functools.partial(LayerNorm, config, compute, config.bias)

        normed = norm(name="attention_norm")(x) if self.has_norm else x
        keys, rate = fold_in(dropout_keys, number + 1), config.attention_output_dropout_prob
        attended = RotaryAttention(config, compute, self.is_global, name="attention")(normed, rotations, segments, keys)
        x, normed = norm(name="output_norm").and_sum(x, attended, None, keys, rate)

        if config.glu:
            axes = ("embed", "projections", "mlp")
            inner = Dense(config, compute, hidden, (2, *wide), axes, config.bias, name="input")(normed, keys)
        else:
            inner = Dense(config, compute, hidden, wide, ("embed", "mlp"), config.bias, name="input")(normed, keys)
        output = Dense(config, compute, wide, hidden, ("mlp", "embed"), config.bias, scale, name="output")

        inner = activate(inner, config.hidden_act, compute)
        x = x + output(nn.with_logical_constraint(inner, ("batch", "length", "mlp")), keys)
        return nn.with_logical_constraint(x, ("batch", "length", "embed"))


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions: to all tokens of a segment (global), or within a window (local)."""

    config: ModernBertConfig
    compute: Compute
    is_global: bool

    @nn.compact
    def __call__(
        self, x: jax.Array, rotations: tuple[Rotation, Rotation], segments: jax.Array, keys: jax.Array | None = None
    ) -> jax.Array:
        """Returns the output of the attention `[batch, length, hidden]`.

        Args:
          x: `[batch, length, hidden]`.
          rotations: the rotary angles of global layers, and of local layers.
          segments: `[batch, length]`.
          keys: random keys `[batch]` for the dropout of LoRA, or None.
        """
        config, compute = self.config, self.compute
        hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_size
        axes: tuple[str, ...] = ("embed", "projections", "heads", "kv")
        project = Dense(config, compute, (hidden,), (3, heads, size), axes, config.bias, name="query_key_value")
        angles = rotations[0 if self.is_global else 1]
        window = None if self.is_global else config.window
        if has_kernels(compute.chip) and can_flash(x.shape[1], hidden, size) and project.can_merge(keys):
            kernel, bias = project.merged().astype(compute.dtype), cast(Any, project.bias)
            bias = None if bias is None else bias.astype(compute.dtype)
            context = flash_attention(x, kernel, bias, angles, segments, compute.chip, window)
        else:
            context = attend_rotary(rotate(project(x, keys), angles), segments, compute, window)
        axes, scale = ("heads", "kv", "embed"), config.output_init_scale
        return Dense(config, compute, (heads, size), (hidden,), axes, config.bias, scale, name="output")(context, keys)


def layers_of(encoder: dict, config: ModernBertConfig) -> list[dict]:
    """Returns the params of all layers, in order."""
    groups = encoder.get("groups", {})
    count = (config.num_hidden_layers - 1) // config.global_attn_every_n_layers
    in_groups = [
        jax.tree.map(lambda x, number=number: x[number], groups[f"layer_{layer}"])
        for number in range(count)
        for layer in range(len(groups))
    ]
    rest = encoder.get("rest", {})
    return [encoder["first"], *in_groups, *(rest[f"layer_{number}"] for number in range(len(rest)))]
