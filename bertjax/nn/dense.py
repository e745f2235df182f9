"""Dense layers, with low-rank updates."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute, Lora, ModelConfig
from bertjax.nn.ops import low_rank
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.matmul import project


def partitioned(init: Callable[..., Array], axes: tuple[str | None, ...]) -> Callable[..., Any]:
    """Returns an initializer of a param with logical axes. In a module the param is an array without a box."""
    return nn.with_logical_partitioning(init, axes)


class Dense(nn.Module):
    """x W + b over the last dimension of x.

    Attributes:
      config: the model config.
      compute: the dtypes, and low-rank updates.
      inputs: the shape of the last dimension of x in W.
      features: the shape of the result in W.
      axes: the logical axes of W.
      use_bias: whether there is b.
      init_scale: multiplies the standard deviation of the initial values of W.
    """

    config: ModelConfig
    compute: Compute
    inputs: tuple[int, ...]
    features: tuple[int, ...]
    axes: tuple[str | None, ...]
    use_bias: bool = True
    init_scale: float = 1.0

    def setup(self) -> None:
        """Builds the params."""
        init = nn.initializers.truncated_normal(self.config.initializer_range * self.init_scale)
        kernel_init = partitioned(init, self.axes)
        bias_init = partitioned(nn.initializers.zeros, self.axes[len(self.inputs) :])
        self.kernel = self.param("kernel", kernel_init, self.inputs + self.features)
        self.bias: Any = self.param("bias", bias_init, self.features) if self.use_bias else None
        self.updated, lora = low_rank.targeted(self.compute.lora, self.path), self.compute.lora
        if lora and self.updated:
            shapes, axes = low_rank.shapes_of(self.path, self.updated, self.inputs, self.features, self.axes, lora)
            fan_in = math.prod(self.inputs)
            self.lora_a = self.param("lora_a", partitioned(low_rank.init_a, axes[0]), shapes[0], fan_in)
            self.lora_b = self.param("lora_b", partitioned(nn.initializers.zeros, axes[1]), shapes[1])

    def __call__(self, x: Array, keys: Array | None = None) -> Array:
        """Returns x W + b; see `product`."""
        product = self.product(x, keys)
        return product if self.bias is None else product + self.bias.astype(self.compute.dtype)

    def product(self, x: Array, keys: Array | None = None) -> Array:
        """Returns x W with the low-rank update of W; the dropout of the update takes the `keys` of the layer."""
        product = project(x, self.kernel.reshape(-1, *self.features), self.compute)
        return product + self._update(x, keys, self.compute.lora) if self.compute.lora and self.updated else product

    def _update(self, x: Array, keys: Array | None, lora: Lora) -> Array:
        x = dropout(x, lora.dropout, fold_in(keys, low_rank.site_of(self.path)))
        a = self.lora_a.reshape(x.shape[-1], -1, lora.rank)
        b = self.lora_b.reshape(a.shape[1], lora.rank, -1).astype(self.compute.dtype)
        update = lora.scale * jnp.einsum("...nr,nrf->...nf", project(x, a, self.compute), b)
        if low_rank.stacked_matrices(self.path):
            whole = jnp.zeros((*update.shape[:-2], self.features[0], update.shape[-1]), update.dtype)
            update = whole.at[..., jnp.array(self.updated), :].set(update)
        return update.reshape(*x.shape[:-1], *self.features)

    def can_merge(self, keys: Array | None) -> bool:
        """Returns whether `merged` can replace W and its update: not with dropout, which applies to the update only."""
        return not (self.compute.lora and self.updated) or keys is None or self.compute.lora.dropout == 0

    def merged(self) -> Array:
        """Returns the sum of W and its update, for a kernel that multiplies by W."""
        if not self.compute.lora or not self.updated:
            return self.kernel
        update = low_rank.product(self.lora_a, self.lora_b, self.updated, low_rank.stacked_matrices(self.path))
        return self.kernel + self.compute.lora.scale * update
