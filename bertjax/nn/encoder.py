"""The layers of a Transformer encoder, from the choices of a model."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.nn.attention import Attention, AttentionChoices, SharedInputs
from bertjax.nn.feed_forward import FeedForward
from bertjax.nn.norm import Norm, Normalize, residual_sum
from bertjax.nn.ops.dropout import fold_in
from bertjax.nn.ops.plain_attention import KeyValueCache
from bertjax.nn.ops.rotary import rotation
from bertjax.nn.positions import PositionEmbeddings

Part = Callable[[Array], tuple[Array, Array | None]]  # x -> the product of the last dense layer, and its bias


class Dropout(NamedTuple):
    """The dropout of the output of a part: keys `[batch]` or None, and the rate."""

    keys: Array | None
    rate: float


class Residual(abc.ABC):
    """The places of the norms in a layer. The layer has two parts, attention and the feed-forward network."""

    ends_with_norm: bool = False  # whether the output of a layer is normalized, so that a final norm is not necessary

    @abc.abstractmethod
    def __call__(
        self, norm: Callable[[str], Normalize], x: Array, parts: tuple[Part, Part], dropouts: tuple[Dropout, Dropout]
    ) -> Array:
        """Returns the output of a layer.

        Args:
          norm: returns the norm with a name; the name is the name of the params.
          x: the input of the layer, `[batch, length, hidden]`.
          parts: attention and the feed-forward network.
          dropouts: the dropouts of the outputs of the parts.
        """

    def attention_input(self, norm: Callable[[str], Callable[[Array], Array]], x: Array) -> Array:
        """Returns the input of the attention for an input of the layer."""
        return x


@dataclasses.dataclass(frozen=True)
class PostNorm(Residual):
    """A norm after each residual sum: norm(x + part(x)) (Vaswani et al. 2017)."""

    ends_with_norm = True

    def __call__(
        self, norm: Callable[[str], Normalize], x: Array, parts: tuple[Part, Part], dropouts: tuple[Dropout, Dropout]
    ) -> Array:
        """Returns the output of a layer, see `Residual`."""
        for name, part, dropout in zip(("attention_norm", "output_norm"), parts, dropouts, strict=True):
            x = norm(name).of_sum(x, *part(x), *dropout)
        return x


@dataclasses.dataclass(frozen=True)
class PreNorm(Residual):
    """A norm before each part: x + part(norm(x)) (Radford et al. 2019).

    Attributes:
      before_attention: whether there is a norm before the attention. The first layer of ModernBERT has no such norm,
        because the embeddings end with a norm.
    """

    before_attention: bool = True

    def __call__(
        self, norm: Callable[[str], Normalize], x: Array, parts: tuple[Part, Part], dropouts: tuple[Dropout, Dropout]
    ) -> Array:
        """Returns the output of a layer, see `Residual`."""
        attend, feed = parts
        update = attend(self.attention_input(norm, x))
        x, normalized = norm("output_norm").and_sum(x, *update, *dropouts[0])
        return residual_sum(x, *feed(normalized), *dropouts[1])

    def attention_input(self, norm: Callable[[str], Callable[[Array], Array]], x: Array) -> Array:
        """Returns the normalized input."""
        return norm("attention_norm")(x) if self.before_attention else x


@dataclasses.dataclass(frozen=True)
class SandwichNorm(Residual):
    """A norm before and after each part: x + norm(part(norm(x))) (Ding et al. 2021; Gemma 2)."""

    def __call__(
        self, norm: Callable[[str], Normalize], x: Array, parts: tuple[Part, Part], dropouts: tuple[Dropout, Dropout]
    ) -> Array:
        """Returns the output of a layer, see `Residual`."""
        attend, feed = parts
        update = norm("attention_output_norm")(_sum(*attend(self.attention_input(norm, x))))
        x, normalized = norm("output_norm").and_sum(x, update, None, *dropouts[0])
        update = norm("feed_forward_output_norm")(_sum(*feed(normalized)))
        return residual_sum(x, update, None, *dropouts[1])

    def attention_input(self, norm: Callable[[str], Callable[[Array], Array]], x: Array) -> Array:
        """Returns the normalized input."""
        return norm("attention_norm")(x)


def _sum(product: Array, bias: Array | None) -> Array:
    return product if bias is None else product + bias.astype(product.dtype)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The choices of a layer. Equal choices compare equal.

    Attributes:
      attention: the attention.
      feed_forward: the feed-forward network.
      norm: all norms of the layer.
      residual: the places of the norms.
      attention_output_dropout: the dropout rate of the output of the attention.
      output_dropout: the dropout rate of the output of the feed-forward network.
      positions: embeddings of positions that are added to the input of the layer (Al-Rfou et al. 2019); None: no
        such embeddings.
      shares_keys: whether all dropouts of the layer have the same key. False: each part has its keys.
    """

    attention: AttentionChoices
    feed_forward: FeedForward
    norm: Norm
    residual: Residual = PostNorm()
    attention_output_dropout: float = 0.0
    output_dropout: float = 0.0
    positions: PositionEmbeddings | None = None
    shares_keys: bool = False

    def flops(self, hidden: int, length: int) -> int:
        """Returns the FLOPs of the matrix products for one row of `length` tokens."""
        return self.attention.flops(hidden, length) + length * self.feed_forward.flops_per_token(hidden)


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of an encoder. A scan runs over the repeated layers, whose params are stacked.

    If all layers have the same choices, their params are stacked under the name `layers`. Otherwise the params have the
    names `first`, `groups/layer_0`, `groups/layer_1`, ..., stacked over the groups, and `rest/layer_0`, ... for the
    layers after the last whole group.

    Attributes:
      count: the number of layers.
      group: the choices of consecutive layers, which repeat.
      first: the choices of the first layer, if the group begins with the second layer; None: no such layer.
      shared: the number of consecutive layers that share their params (ALBERT), for a group of one layer. It divides
        `count`.
      norm: the norm after the last layer; None: no norm.
    """

    count: int
    group: tuple[Layer, ...]
    first: Layer | None = None
    shared: int = 1
    norm: Norm | None = None

    def __post_init__(self) -> None:
        """Checks the number of layers that share params."""
        if self.shared != 1 and (not self.is_uniform or self.count % self.shared):
            raise ValueError(f"shared = {self.shared} must divide count = {self.count}, and needs equal layers")

    @classmethod
    def of(cls, layers: Sequence[Layer], norm: Norm | None = None) -> "Layers":
        """Returns layers with the shortest group that gives the choices of all `layers`."""
        is_period = (n for n in range(1, len(layers) + 1) if all(x == layers[i % n] for i, x in enumerate(layers)))
        return cls(len(layers), tuple(layers[: next(is_period)]), norm=norm)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same choices."""
        return self.first is None and len(self.group) == 1

    @property
    def stored(self) -> int:
        """The number of layers that have params of their own."""
        return self.count // self.shared

    @property
    def before_groups(self) -> int:
        """The number of layers before the first group: 0 or 1."""
        return 0 if self.first is None else 1

    @property
    def groups(self) -> int:
        """The number of whole groups."""
        return (self.count - self.before_groups) // len(self.group)

    @property
    def rest(self) -> tuple[Layer, ...]:
        """The choices of the layers after the last whole group."""
        return self.group[: (self.count - self.before_groups) % len(self.group)]

    def __iter__(self) -> Iterator[Layer]:
        """Yields the choices of each layer."""
        if self.first is not None:
            yield self.first
        for number in range(self.count - self.before_groups):
            yield self.group[number % len(self.group)]

    def flops(self, hidden: int, length: int) -> int:
        """Returns the FLOPs of the matrix products of all layers for one row of `length` tokens."""
        return sum(layer.flops(hidden, length) for layer in self)

    def stack(self, layers: Sequence[Any]) -> dict:
        """Returns the params of the encoder's layers from the params of each layer that has params of its own."""

        def stacked(some: Sequence[Any]) -> Any:
            return jax.tree.map(lambda *arrays: np.stack(arrays), *some)

        if self.is_uniform:
            return {"layers": stacked(layers)}
        period, start, stop = len(self.group), self.before_groups, self.before_groups + self.groups * len(self.group)
        params: dict = {"first": layers[0]} if start else {}
        if self.groups:
            params["groups"] = {f"layer_{i}": stacked(layers[start + i : stop : period]) for i in range(period)}
        if self.rest:
            params["rest"] = {f"layer_{i}": layer for i, layer in enumerate(layers[stop:])}
        return params

    def unstack(self, encoder: dict) -> list[dict]:
        """Returns the params of each layer that has params of its own, in order. The inverse of `stack`."""

        def numbered(tree: Any, number: int) -> Any:
            return jax.tree.map(lambda x: x[number], tree)

        if self.is_uniform:
            return [numbered(encoder["layers"], number) for number in range(self.stored)]
        period = range(len(self.group))
        return [
            *([encoder["first"]] if self.before_groups else []),
            *(numbered(encoder["groups"][f"layer_{i}"], number) for number in range(self.groups) for i in period),
            *(encoder["rest"][f"layer_{i}"] for i in range(len(self.rest))),
        ]

    def by_layer(self, encoder: dict) -> list[dict]:
        """Returns the params of each layer. Layers that share params are repeated."""
        return [params for params in self.unstack(encoder) for _ in range(self.shared)]

    def ids(self, path: Sequence[str]) -> np.ndarray | None:
        """Returns the layer numbers of a param of the layers, see `ModelFamily.layer_ids`; None for other params.

        The number of layers that share params is the number of the last of these layers.
        """
        name, *below = path
        if name == "layers":
            return self.shared * (1 + np.arange(self.stored))
        if name == "first":
            return np.array(1)
        if name not in ("groups", "rest"):
            return None
        number = 1 + self.before_groups + int(below[0].removeprefix("layer_"))
        period = len(self.group)
        return number + (period * np.arange(self.groups) if name == "groups" else np.array(period * self.groups))


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
