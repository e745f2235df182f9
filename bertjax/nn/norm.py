"""The norms of hidden states: LayerNorm (Ba et al. 2016) and RMSNorm (Zhang and Sennrich 2019)."""

import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.nn.dense import partitioned
from bertjax.nn.kernels.fused_norm import can_add_norm, fused_add_norm
from bertjax.nn.kernels.gpu_norm import can_norm_on_gpu, gpu_add_norm, gpu_norm, gpu_sum_and_norm
from bertjax.nn.kernels.pallas import has_kernels
from bertjax.nn.ops.dropout import dropout


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """Subtracts the mean, and divides by the standard deviation.

    Attributes:
      epsilon: the number that is added to the variance.
      bias: whether there is a learned bias.
    """

    epsilon: float
    bias: bool = True
    centers: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class RMSNorm:
    """Divides by the root of the mean square, without a bias.

    Attributes:
      epsilon: the number that is added to the mean square.
    """

    epsilon: float
    bias: ClassVar[bool] = False
    centers: ClassVar[bool] = False


Norm = LayerNorm | RMSNorm


class Normalize(nn.Module):
    """A norm over the last axis, with a learned scale.

    Computes statistics in float32 and in two passes, because a single pass loses precision.

    Attributes:
      norm: the norm.
      size: the number of elements of the last axis.
      compute: the dtypes and the chip.
      axis: the logical axis of the params.
    """

    norm: Norm
    size: int
    compute: Compute
    axis: str = "embed"

    def setup(self) -> None:
        """Builds the params."""
        self.scale = self.param("scale", partitioned(nn.initializers.ones, (self.axis,)), (self.size,))
        zeros = partitioned(nn.initializers.zeros, (self.axis,))
        self.bias: Any = self.param("bias", zeros, (self.size,)) if self.norm.bias else None
        self._settings = self.norm.epsilon, self.compute.chip

    def __call__(self, x: Array) -> Array:
        """`[..., size]` -> `[..., size]`."""
        if x.ndim == 3 and self._runs_on_gpu(x):
            return gpu_norm(x.astype(self.compute.dtype), self.scale, self.bias, *self._settings)
        scaled = standardize(x, *self._settings, self.norm.centers) * self.scale
        return (scaled if self.bias is None else scaled + self.bias).astype(self.compute.dtype)

    def of_sum(
        self, x: Array, update: Array, update_bias: Array | None, dropout_keys: Array | None, rate: float
    ) -> Array:
        """Normalizes x + dropout(update + update_bias): `[batch, length, size]`.

        The bias and the keys `[batch]` may be None.
        """
        params = self.scale, self.bias
        has_bias = self.norm.centers and self.bias is not None
        if has_bias and has_kernels(self.compute.chip) and can_add_norm(*x.shape[1:]):
            return fused_add_norm(x, update, update_bias, *params, dropout_keys, rate, *self._settings)
        if self._runs_on_gpu(x):
            return gpu_add_norm(x, update, update_bias, *params, dropout_keys, rate, *self._settings)
        return self(residual_sum(x, update, update_bias, dropout_keys, rate))

    def and_sum(
        self, x: Array, update: Array, update_bias: Array | None, dropout_keys: Array | None, rate: float
    ) -> tuple[Array, Array]:
        """Returns the sum x + dropout(update + update_bias), `[batch, length, size]`, and the normalized sum.

        The bias and the keys `[batch]` may be None.
        """
        if self._runs_on_gpu(x):
            params = self.scale, self.bias
            return gpu_sum_and_norm(x, update, update_bias, *params, dropout_keys, rate, *self._settings)
        total = residual_sum(x, update, update_bias, dropout_keys, rate)
        return total, self(total)

    def _runs_on_gpu(self, x: Array) -> bool:
        return self.norm.centers and can_norm_on_gpu(self.compute, *x.shape[1:])


def layer_norm(config: ModelConfig, compute: Compute, name: str, size: int | None = None) -> Normalize:
    """Returns a LayerNorm with the settings of a model config; the default of `size` is the hidden size."""
    settings: Any = config
    return Normalize(LayerNorm(settings.layer_norm_eps, config.bias), size or config.hidden_size, compute, name=name)


def residual_sum(x: Array, update: Array, update_bias: Array | None, dropout_keys: Array | None, rate: float) -> Array:
    """Returns x + dropout(update + update_bias), `[batch, length, hidden]`. Bias and keys `[batch]` may be None."""
    update = update if update_bias is None else update + update_bias.astype(update.dtype)
    return x + dropout(update, rate, dropout_keys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def standardize(x: Array, epsilon: float, chip: str = "", centers: bool = True) -> Array:
    """Subtracts the mean over the last axis and divides by the standard deviation, in float32.

    The gradient in closed form needs x and two numbers per row. Automatic differentiation would store and read more.

    Args:
      x: `[..., hidden]`.
      epsilon: added to the variance.
      chip: `device_kind`.
      centers: False: does not subtract the mean, and divides by the root of the mean square.
    """
    return _standardize_forward(x, epsilon, chip, centers)[0]


def _standardize_forward(x: Array, epsilon: float, chip: str, centers: bool) -> tuple[Array, Any]:
    mean = _mean(x.astype(jnp.float32), chip) if centers else None
    centered = x.astype(jnp.float32) if mean is None else x - mean
    inverse = jax.lax.rsqrt(_mean(jnp.square(centered), chip) + epsilon)
    return centered * inverse, (x, mean, inverse)


def _standardize_backward(epsilon: float, chip: str, centers: bool, saved: Any, grad: Array) -> tuple[Array]:
    del epsilon, centers
    x, mean, inverse = saved
    y = (x if mean is None else x - mean) * inverse
    centered = grad if mean is None else grad - _mean(grad, chip)
    return ((inverse * (centered - y * _mean(grad * y, chip))).astype(x.dtype),)


standardize.defvjp(_standardize_forward, _standardize_backward)


def _mean(x: Array, chip: str) -> Array:
    """Returns the mean over the last axis, with this axis. A product on CPUs halves the time of LayerNorm."""
    if chip != "cpu":
        return x.mean(-1, keepdims=True)
    share = jnp.full(x.shape[-1:], 1 / x.shape[-1], x.dtype)
    return jnp.einsum("...h,h->...", x, share, precision="highest")[..., None]
