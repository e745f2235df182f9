"""The modules of ModernBERT."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.models.modernbert.config import ModernBertConfig
from bertjax.nn.attention import Dense, LayerNorm
from bertjax.nn.encoder import ACTIVATIONS, Embedding, activate, recomputed, stacked
from bertjax.nn.encoder_model import RotaryModel
from bertjax.nn.kernels.flash_attention import can_flash, flash_attention
from bertjax.nn.kernels.pallas import has_kernels
from bertjax.nn.ops.dropout import fold_in
from bertjax.nn.ops.plain_attention import visible
from bertjax.nn.ops.rotary import Rotation, rotate, rotation
from bertjax.nn.ops.segments import mean_of_segments
from bertjax.nn.rotary_attention import attend


class ModernBertModel(RotaryModel):
    """Word embeddings, layers of global and of local attention, and a head for classification."""

    config: ModernBertConfig
    compute: Compute = Compute()

    def setup(self):
        self.embeddings = ModernBertEmbeddings(self.config, self.compute)
        self.encoder = ModernBertEncoder(self.config, self.compute)
        self.pooler = Head(self.config, self.compute)

    def pool(self, hidden, segments, first_tokens):
        """The head of the first token's state, or of the mean state of a text (`classifier_pooling`)."""
        tokens = jnp.zeros((hidden.shape[0], 1), jnp.int32) if first_tokens is None else first_tokens
        if self.config.classifier_pooling == "mean":
            pooled = mean_of_segments(hidden, segments, tokens)
        else:
            pooled = jnp.take_along_axis(hidden, tokens[..., None], axis=1)
        pooled = self.pooler(pooled)
        return pooled[:, 0] if first_tokens is None else pooled

    def of_tokens(self, hidden):
        return self.pooler(hidden)


class ModernBertEmbeddings(nn.Module):
    """Word embeddings and a LayerNorm; projection, if hidden states have another size."""

    config: ModernBertConfig
    compute: Compute

    def setup(self):
        self.word = Embedding(self.config, self.compute.dtype, self.config.padded_vocab_size, "vocab")
        size, hidden = self.config.embedding_size, self.config.hidden_size
        self.norm = LayerNorm(self.config, self.compute, self.config.bias, size)
        if size != hidden:
            axes = ("embed", None)
            self.projection = Dense(self.config, self.compute, (size,), (hidden,), axes, self.config.bias)

    def __call__(self, input_ids):
        x = self.norm(self.word(input_ids))
        return x if self.config.embedding_size == self.config.hidden_size else self.projection(x)


class Head(nn.Module):
    """Dense, activation, LayerNorm: `[..., hidden]` -> the same."""

    config: ModernBertConfig
    compute: Compute

    @nn.compact
    def __call__(self, hidden):
        config, size = self.config, hidden.shape[-1:]
        scale = config.output_init_scale
        x = Dense(config, self.compute, size, size, ("embed", None), config.bias, scale, name="dense")(hidden)
        return LayerNorm(config, self.compute, config.bias, name="norm")(ACTIVATIONS[config.hidden_act](x))


class ModernBertEncoder(nn.Module):
    """The layers and a LayerNorm. After the first layer, which has no norm of its own, they come in groups: as many
    local ones as there are between two global ones, and a global one. Groups are a scan, and what is left comes last.
    """

    config: ModernBertConfig
    compute: Compute

    @nn.compact
    def __call__(self, x, positions, segments, dropout_keys=None, *, every_layer: bool = False):
        """As `RotaryModel` calls it."""
        config, compute = self.config, self.compute
        turns = {
            theta: rotation(positions, config.head_size, theta)
            for theta in (config.global_rope_theta, config.local_rope_theta)
        }
        rotations = turns[config.global_rope_theta], turns[config.local_rope_theta]
        period, layers = config.global_attn_every_n_layers, config.num_hidden_layers
        count, left = divmod(layers - 1, period)
        given = (rotations, segments, dropout_keys)

        x = _layer(config, compute, is_global=True, has_norm=False, name="first")(x, 0, *given)
        states = [x[None]]
        if count:
            in_axes = (0, nn.broadcast, nn.broadcast, nn.broadcast)
            make = stacked(LayerGroup, count, in_axes, compute, dropout_keys is not None)
            groups = make(config, compute, period, every_layer, name="groups")
            x, each = groups(x, 1 + period * jnp.arange(count), *given)
            states.append(each.reshape(-1, *x.shape) if every_layer else each)
        if left:
            x, each = LayerGroup(config, compute, left, every_layer, name="rest")(x, layers - left, *given)
            states.append(each)
        last = LayerNorm(config, compute, config.bias, name="norm")(x)
        return jnp.concatenate(states).at[-1].set(last) if every_layer else last


class LayerGroup(nn.Module):
    """Layers one after the other, of which the last is global if they are all of a period."""

    config: ModernBertConfig
    compute: Compute
    layers: int
    every_layer: bool = False

    @nn.compact
    def __call__(self, x, number, rotations, segments, dropout_keys):
        """`number`: that of the first layer. Returns x, and the states after each layer, if asked for."""
        states = []
        for layer in range(self.layers):
            is_global = self.config.is_global(1 + layer)
            make = _layer(self.config, self.compute, is_global, has_norm=True, name=f"layer_{layer}")
            x = make(x, number + layer, rotations, segments, dropout_keys)
            states.append(x)
        return x, (jnp.stack(states) if self.every_layer else None)


def _layer(config: ModernBertConfig, compute: Compute, is_global: bool, has_norm: bool, name: str) -> nn.Module:
    return recomputed(Layer, compute)(config, compute, is_global, has_norm, name=name)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)). Dropout follows attention only."""

    config: ModernBertConfig
    compute: Compute
    is_global: bool
    has_norm: bool

    @nn.compact
    def __call__(self, x, number, rotations: tuple[Rotation, Rotation], segments, dropout_keys):
        config, compute = self.config, self.compute
        hidden, wide, scale = (config.hidden_size,), (config.intermediate_size,), config.output_init_scale
        norm = functools.partial(LayerNorm, config, compute, config.bias)

        read = norm(name="attention_norm")(x) if self.has_norm else x
        keys, rate = fold_in(dropout_keys, number + 1), config.attention_output_dropout_prob
        attended = RotaryAttention(config, compute, self.is_global, name="attention")(read, rotations, segments, keys)
        x, read = norm(name="output_norm").and_sum(x, attended, None, keys, rate)

        if config.glu:
            axes = ("embed", "projections", "mlp")
            inner = Dense(config, compute, hidden, (2, *wide), axes, config.bias, name="input")(read, keys)
        else:
            inner = Dense(config, compute, hidden, wide, ("embed", "mlp"), config.bias, name="input")(read, keys)
        output = Dense(config, compute, wide, hidden, ("mlp", "embed"), config.bias, scale, name="output")

        inner = activate(inner, config.hidden_act, compute)
        x = x + output(nn.with_logical_constraint(inner, ("batch", "length", "mlp")), keys)
        return nn.with_logical_constraint(x, ("batch", "length", "embed"))


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions, of all tokens of a segment or of those within the window."""

    config: ModernBertConfig
    compute: Compute
    is_global: bool

    @nn.compact
    def __call__(self, x, rotations, segments, keys=None):
        """`[batch, length, hidden]`, segments `[batch, length]` -> `[batch, length, hidden]`."""
        config, compute = self.config, self.compute
        hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_size
        axes = ("embed", "projections", "heads", "kv")
        project = Dense(config, compute, (hidden,), (3, heads, size), axes, config.bias, name="query_key_value")
        turn = rotations[0 if self.is_global else 1]
        window = None if self.is_global else config.window
        if has_kernels(compute.chip) and can_flash(x.shape[1], hidden, size) and project.can_merge(keys):
            kernel, bias = (
                each if each is None else each.astype(compute.dtype) for each in (project.merged(), project.bias)
            )
            context = flash_attention(x, kernel, bias, turn, segments, compute.chip, window)
        else:
            context = attend(rotate(project(x, keys), turn), segments, compute, window)
        axes, scale = ("heads", "kv", "embed"), config.output_init_scale
        return Dense(config, compute, (heads, size), (hidden,), axes, config.bias, scale, name="output")(context, keys)


def attention_probabilities(config: ModernBertConfig, params: dict, ids: jax.Array, segments: jax.Array) -> jax.Array:
    """Returns what each head of each layer attends to in a text: `[layers, heads, queries, keys]`."""
    inputs = (ids, segments, jnp.zeros_like(ids))
    states = ModernBertModel(config).apply({"params": params}, *inputs, every_layer=True, method="encode")
    positions, found = jnp.arange(ids.shape[1])[None], []
    for number, (layer, x) in enumerate(zip(layers_of(params["encoder"], config), states)):
        if "attention_norm" in layer:
            norm = LayerNorm(config, Compute(), config.bias)
            x = norm.apply({"params": layer["attention_norm"]}, x)
        project = layer["attention"]["query_key_value"]
        projected = jnp.einsum("blh,hpnd->blpnd", x, project["kernel"]) + project.get("bias", 0.0)
        is_global = config.is_global(number)
        theta = config.global_rope_theta if is_global else config.local_rope_theta
        query, key, _ = jnp.moveaxis(rotate(projected, rotation(positions, config.head_size, theta))[0], 1, 0)
        scores = jnp.einsum("qnd,knd->nqk", query, key) / config.head_size**0.5
        seen = visible(segments, window=None if is_global else config.window)[0]
        found.append(nn.softmax(jnp.where(seen, scores, -jnp.inf)))
    return jnp.stack(found)


def layers_of(encoder: dict, config: ModernBertConfig) -> list[dict]:
    """Returns the params of each layer, in their order."""
    groups = encoder.get("groups", {})
    count = (config.num_hidden_layers - 1) // config.global_attn_every_n_layers
    each = [
        jax.tree.map(lambda x, number=number: x[number], groups[f"layer_{layer}"])
        for number in range(count)
        for layer in range(len(groups))
    ]
    return [encoder["first"], *each, *(encoder["rest"][f"layer_{i}"] for i in range(len(encoder.get("rest", {}))))]
