"""The modules of the layers of a Transformer encoder, from the choices of a model."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.nn.attention import Attention, SharedInputs
from bertjax.nn.layers import Dropout, Layer, Layers
from bertjax.nn.norm import Normalize
from bertjax.nn.ops.dropout import fold_in
from bertjax.nn.ops.plain_attention import KeyValueCache
from bertjax.nn.ops.rotary import rotation


class EncoderLayer(nn.Module):
    """One layer.

    Attributes:
      config: the model config.
      compute: the settings of the computation.
      layer: the choices of the layer.
      every_layer: whether the output of the layer is also an output of a scan.
    """

    config: ModelConfig
    compute: Compute
    layer: Layer
    every_layer: bool = False

    @nn.compact
    def __call__(
        self, x: Array, number: Any, cache: KeyValueCache | None, shared: Any, dropout_keys: Array | None
    ) -> tuple[Array, tuple[Array | None, KeyValueCache | None]]:
        """Returns x `[batch, length, hidden]` after the layer; and the outputs of a scan: x or None, and the cache.

        Args:
          x: `[batch, length, hidden]`.
          number: the number of the layer, from 1.
          cache: the keys and values of earlier tokens, or None.
          shared: the inputs that all layers share.
          dropout_keys: `[batch]`, or None.
        """
        config, compute, layer = self.config, self.compute, self.layer
        if layer.positions is not None:
            x += layer.positions.module(config, compute, config.hidden_size, "position")(shared.positions)
        keys = fold_in(dropout_keys, number)
        attention_keys, attended_keys, output_keys = (
            [keys] * 3 if layer.shares_keys else [fold_in(keys, site) for site in range(3)]
        )
        attention = layer.attention.module(config, compute, "attention")
        next_cache = cache

        def attend(x: Array) -> tuple[Array, Array | None]:
            nonlocal next_cache
            product, bias, next_cache = attention(x, shared, attention_keys, cache)
            return product, bias

        def feed(x: Array) -> tuple[Array, Array | None]:
            return layer.feed_forward(config, compute, x, output_keys)

        def norm(name: str) -> Normalize:
            return Normalize(layer.norm, config.hidden_size, compute, name=name)

        rates = layer.attention_output_dropout, layer.output_dropout
        keys_of_rates = zip((attended_keys, output_keys), rates)
        dropouts = [Dropout(keys if rate else None, rate) for keys, rate in keys_of_rates]
        x = layer.residual(norm, x, (attend, feed), (dropouts[0], dropouts[1]))
        x = nn.with_logical_constraint(self.finish(x, number, shared), ("batch", "length", "embed"))
        return x, (x if self.every_layer else None, next_cache)

    def finish(self, x: Array, number: Any, shared: Any) -> Array:
        """Returns the output of the layer. A family may change it; the default is x `[batch, length, hidden]`."""
        return x


class SharedLayers(EncoderLayer):
    """Consecutive layers that share params: a scan over layer numbers that reads the params of one layer.

    The dropout of a layer depends on the number of the layer, so that layers with shared params have different masks.
    """

    @nn.compact
    def __call__(self, x: Array, numbers: Array, *inputs: Any) -> tuple[Array, Any]:
        """Returns x `[batch, length, hidden]` after the layers `numbers` `[layers]`, and the outputs of each layer.

        The caches in `inputs` are stacked on `[layers]`, see `EncoderLayer`.
        """
        trains = inputs[-1] is not None
        repeated = nn.scan(
            recomputed(EncoderLayer.__call__, self.compute),
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=LAYER_AXES,
            length=len(numbers),
            unroll=len(numbers) if self.compute.unroll and trains else 1,
        )
        return repeated(self, x, numbers, *inputs)


class LayerGroup(nn.Module):
    """Consecutive layers with different choices.

    Attributes:
      config: the model config.
      compute: the settings of the computation.
      layers: the choices of the layers.
      layer_class: the class of a layer.
      every_layer: whether the outputs of all layers are outputs of a scan.
    """

    config: ModelConfig
    compute: Compute
    layers: tuple[Layer, ...]
    layer_class: type[EncoderLayer] = EncoderLayer
    every_layer: bool = False

    @nn.compact
    def __call__(
        self, x: Array, number: Any, cache: None, shared: Any, dropout_keys: Array | None
    ) -> tuple[Array, tuple[Array | None, None]]:
        """Returns x after the layers; and their outputs `[layers, batch, length, hidden]` with `every_layer`.

        `number` is the number of the first layer. For other arguments see `EncoderLayer`.
        """
        states = []
        make = recomputed(self.layer_class, self.compute)
        for i, layer in enumerate(self.layers):
            x, _ = make(self.config, self.compute, layer, name=f"layer_{i}")(x, number + i, cache, shared, dropout_keys)
            states.append(x)
        return x, (jnp.stack(states) if self.every_layer else None, None)


def recomputed(layer: Callable[..., Any], compute: Compute) -> Callable[..., Any]:
    """Returns a layer of a scan whose backward pass recomputes values according to `compute.remat`.

    The layer is a module class, or a function whose first argument is a module.
    """
    if compute.remat == "none":
        return layer
    policy = jax.checkpoint_policies.checkpoint_dots if compute.remat == "dots" else None
    return nn.remat(layer, prevent_cse=False, policy=policy)  # a scan body needs no CSE guard


def scan_layers(
    layer: Callable[..., Any], count: int, in_axes: tuple, compute: Compute, trains: bool
) -> Callable[..., Any]:
    """Returns `count` layers as a scan, which training may unroll: params are stacked on a leading `layers` axis.

    Args:
      layer: the class of the layers.
      count: the number of layers.
      in_axes: for each input after the first: 0 if the input is stacked, `nn.broadcast` if all layers share it.
      compute: the settings, which may unroll the scan.
      trains: whether the program trains.
    """
    return nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=in_axes,
        length=count,
        unroll=count if compute.unroll and trains else 1,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )


# The axes of the inputs of `EncoderLayer` after x, in a scan over layers.
LAYER_AXES = (0, 0, nn.broadcast, nn.broadcast)


class Encoder(nn.Module):
    """The layers and the final norm of an encoder. A family with other layers overrides the methods.

    Attributes:
      config: the model config.
      compute: the settings of the computation.
      layers: the choices of all layers.
    """

    config: ModelConfig
    compute: Compute
    layers: Layers

    def layer_class(self) -> type[EncoderLayer]:
        """Returns the class of a layer."""
        return EncoderLayer

    def shared_inputs(
        self,
        x: Array,
        segments: Array,
        positions: Array | None,
        score_bias: Array | None = None,
        dropout_keys: Array | None = None,
    ) -> Any:
        """Returns the inputs that all layers share; the default is `SharedInputs`. Arguments as in `__call__`."""
        return shared_inputs(self.layers, segments, positions, score_bias)

    @nn.compact
    def __call__(
        self,
        x: Array,
        segments: Array,
        dropout_keys: Array | None = None,
        positions: Array | None = None,
        *,
        every_layer: bool = False,
        cache: KeyValueCache | None = None,
        score_bias: Array | None = None,
        mask: Array | None = None,
    ) -> Any:
        """Returns the hidden states of the last layer, or with `every_layer` of all layers.

        Args:
          x: `[batch, length, hidden]`.
          segments: `[batch, length]`; with a cache the positions of the tokens, see `SharedInputs`.
          dropout_keys: `[batch]`; None: no dropout.
          positions: `[batch, length]`, for layers that read positions.
          every_layer: whether to return `[layers, batch, length, hidden]` instead of `[batch, length, hidden]`.
          cache: a cache whose arrays are stacked on `[layers]`. With a cache, the next cache is also returned.
          score_bias: a term of the attention scores of all layers, see `SharedInputs`.
          mask: the tokens that each token attends to, for layers with `SharedInputs`; None: within segments.
        """
        config, layers, states = self.config, self.layers, []
        if cache is not None and not layers.is_uniform:
            raise NotImplementedError("layers with different choices have no cache")
        shared = self.shared_inputs(x, segments, positions, score_bias, dropout_keys)
        inputs = shared if mask is None else shared._replace(mask=mask), dropout_keys
        if layers.is_uniform:
            x, (outputs, cache) = self._repeated(x, every_layer, cache, *inputs)
            states.append(outputs)
        else:
            single = self.layer_class()
            if layers.first is not None:
                x, _ = recomputed(single, self.compute)(config, self.compute, layers.first, name="first")(
                    x, 1, None, *inputs
                )
                states.append(x[None])
            if layers.groups:
                period = len(layers.group)
                make = scan_layers(LayerGroup, layers.groups, LAYER_AXES, self.compute, dropout_keys is not None)
                groups = make(config, self.compute, layers.group, single, every_layer, name="groups")
                numbers = 1 + layers.before_groups + period * jnp.arange(layers.groups)
                x, (outputs, _) = groups(x, numbers, None, *inputs)
                states.append(outputs.reshape(-1, *x.shape) if every_layer else outputs)
            if layers.rest:
                rest = LayerGroup(config, self.compute, layers.rest, single, every_layer, name="rest")
                x, (outputs, _) = rest(x, 1 + layers.count - len(layers.rest), None, *inputs)
                states.append(outputs)
        if layers.norm is not None:
            x = Normalize(layers.norm, config.hidden_size, self.compute, name="norm")(x)
        if cache is not None:
            return x, cache
        if not every_layer:
            return x
        all_states = states[0] if len(states) == 1 else jnp.concatenate(states)
        return all_states if layers.norm is None else all_states.at[-1].set(x)

    def _repeated(
        self, x: Array, every_layer: bool, cache: KeyValueCache | None, shared: Any, dropout_keys: Array | None
    ) -> tuple[Array, Any]:
        """Applies layers with the same choices. Layers that share params are a scan inside of the scan."""
        layers, numbers = self.layers, jnp.arange(1, self.layers.count + 1)  # 0 is the embeddings' dropout
        is_shared = layers.shared > 1
        single: Any = SharedLayers if is_shared else recomputed(self.layer_class(), self.compute)
        make = scan_layers(single, layers.stored, LAYER_AXES, self.compute, dropout_keys is not None)
        repeated = make(self.config, self.compute, layers.group[0], every_layer, name="layers")
        if not is_shared:
            return repeated(x, numbers, cache, shared, dropout_keys)
        grouped = jax.tree.map(lambda a: a.reshape(layers.stored, -1, *a.shape[1:]), (numbers, cache))
        last, outputs = repeated(x, *grouped, shared, dropout_keys)
        return last, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), outputs)


def shared_inputs(
    layers: Layers, segments: Array, positions: Array | None, score_bias: Array | None = None
) -> SharedInputs:
    """Returns the inputs that all layers share.

    Args:
      layers: the choices of the layers.
      segments: `[batch, length]`; with a cache the positions of the tokens, see `SharedInputs`.
      positions: `[batch, length]`.
      score_bias: a term of the attention scores, see `SharedInputs`.
    """
    rotations = {}
    for layer in layers:
        if isinstance(layer.attention, Attention) and layer.attention.rotary is not None:
            if positions is None:
                raise ValueError("rotary positions need the positions of the tokens")
            rotary, key = layer.attention.rotary, layer.attention.rotation_key
            if key not in rotations:
                factor = 1.0 if rotary.scaling is None else rotary.scaling.factor_of_sines
                frequencies = rotary.frequencies(layer.attention.head_size)
                rotations[key] = rotation(positions, frequencies, factor)
    reads_positions = any(layer.positions is not None for layer in layers)
    return SharedInputs(segments, positions if reads_positions else None, rotations or None, score_bias)
