"""The choices of the layers of a Transformer encoder, and the names of their params."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from bertjax.nn.attention import AttentionChoices
from bertjax.nn.feed_forward import FeedForward
from bertjax.nn.norm import Norm, Normalize, residual_sum
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
