"""Dense layers, norms, and multi-head self-attention (Vaswani et al. 2017, section 3.2) within segments."""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import BertConfig, Compute, Lora, ModelConfig
from bertjax.nn.kernels import triton
from bertjax.nn.kernels.fused_attention import LONGEST, fused_attention
from bertjax.nn.kernels.fused_norm import can_add_norm, fused_add_norm
from bertjax.nn.kernels.gpu_attention import can_attend_on_gpu, gpu_attention
from bertjax.nn.kernels.gpu_norm import can_norm_on_gpu, gpu_add_norm, gpu_norm, gpu_sum_and_norm
from bertjax.nn.kernels.pallas import LANES, has_kernels, on_one_device, parts_along
from bertjax.nn.ops import low_rank
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.matmul import project
from bertjax.nn.ops.plain_attention import KeyValueCache, cached_attention, plain_attention
from bertjax.nn.ops.tiles import tile_of


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


class LayerNorm(nn.Module):
    """LayerNorm over the last axis, which has `size` elements, or the hidden size.

    Computes statistics in float32 and in two passes, because a single pass loses precision.
    """

    config: ModelConfig
    compute: Compute
    use_bias: bool = True
    size: int | None = None

    def setup(self) -> None:
        """Builds the params."""
        size = (self.size or self.config.hidden_size,)
        self.scale = self.param("scale", partitioned(nn.initializers.ones, ("embed",)), size)
        zeros = partitioned(nn.initializers.zeros, ("embed",))
        self.bias: Any = self.param("bias", zeros, size) if self.use_bias else None
        self._settings = cast(Any, self.config).layer_norm_eps, self.compute.chip

    def __call__(self, x: Array) -> Array:
        """`[..., hidden]` -> `[..., hidden]`."""
        if x.ndim == 3 and can_norm_on_gpu(self.compute, *x.shape[1:]):
            return gpu_norm(x.astype(self.compute.dtype), self.scale, self.bias, *self._settings)
        scaled = standardize(x, *self._settings) * self.scale
        return (scaled if self.bias is None else scaled + self.bias).astype(self.compute.dtype)

    def of_sum(self, x: Array, update: Array, update_bias: Array | None, dropout_keys: Array | None) -> Array:
        """Normalizes x + dropout(update + update_bias): `[batch, length, hidden]`, keys `[batch]` or None."""
        rate, params = self.config.hidden_dropout_prob, (self.scale, self.bias)
        if has_kernels(self.compute.chip) and can_add_norm(*x.shape[1:]):
            return fused_add_norm(x, update, update_bias, *params, dropout_keys, rate, *self._settings)
        if can_norm_on_gpu(self.compute, *x.shape[1:]):
            return gpu_add_norm(x, update, update_bias, *params, dropout_keys, rate, *self._settings)
        return self(residual_sum(x, update, update_bias, dropout_keys, rate))

    def and_sum(
        self, x: Array, update: Array, update_bias: Array | None, dropout_keys: Array | None, rate: float
    ) -> tuple[Array, Array]:
        """Returns the sum x + dropout(update + update_bias), `[batch, length, hidden]`, and the normalized sum.

        The bias and the keys `[batch]` may be None.
        """
        if can_norm_on_gpu(self.compute, *x.shape[1:]):
            params = self.scale, self.bias
            return gpu_sum_and_norm(x, update, update_bias, *params, dropout_keys, rate, *self._settings)
        total = residual_sum(x, update, update_bias, dropout_keys, rate)
        return total, self(total)


class RMSNorm(nn.Module):
    """LayerNorm without mean and bias (Zhang and Sennrich 2019), over the last axis; statistics in float32."""

    config: ModelConfig
    compute: Compute

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """`[..., hidden]` -> `[..., hidden]`."""
        init = partitioned(nn.initializers.ones, ("embed",))
        scale = self.param("scale", init, (self.config.hidden_size,))
        scaled = standardize(x, cast(Any, self.config).rms_norm_eps, self.compute.chip, False) * scale
        return scaled.astype(self.compute.dtype)


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


class SelfAttention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V with dropout on the probabilities, then the output projection."""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        x: Array,
        segments: Array,
        dropout_keys: Array | None = None,
        cache: KeyValueCache | None = None,
        score_bias: Array | None = None,
    ) -> tuple[Array, Array, KeyValueCache | None]:
        """Returns the product of the output projection, the bias, which is not added yet, and the next cache.

        Args:
          x: `[batch, length, hidden]`; the product has the same shape.
          segments: `[batch, length]`; with a cache the positions of the tokens `[length]`, see `cached_attention`.
          dropout_keys: `[batch]`; None: no dropout.
          cache: the keys and values of earlier tokens; None: no cache.
          score_bias: a term of the scores, float32 `[heads, queries, keys]`, without a cache; None: no term. The
            kernels do not support it.
        """
        config, compute, dtype = self.config, self.compute, self.compute.dtype
        hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_size
        axes = ("embed", "projections", "heads", "kv")
        project = Dense(config, compute, (hidden,), (3, heads, size), axes, name="query_key_value")
        rate = config.attention_probs_dropout_prob
        if cache is not None:
            context, cache = cached_attention(project(x), segments, cache)
        elif score_bias is None and config.attention != "xla" and can_attend_on_gpu(compute, x.shape[1], size):
            projected = project(x, dropout_keys)
            context = gpu_attention(projected, segments, dropout_keys, rate, chip=compute.chip, causal=config.causal)
        elif score_bias is None and fuses(config, compute, x.shape[1]) and project.can_merge(dropout_keys):
            kernel, bias = project.merged().astype(dtype), project.bias.astype(dtype)
            settings = rate, compute.chip, compute.unroll, config.causal
            context = fused_attention(x, kernel, bias, segments, dropout_keys, *settings)
        else:
            tiles = compute.chip == "cpu" and on_one_device()  # devices would have to exchange tiles
            tile = tile_of(x.shape[0], x.shape[1], heads) if tiles else None
            projected = project(x, dropout_keys)
            context = plain_attention(
                projected, segments, dropout_keys, rate, compute, config.causal, tile, bias=score_bias
            )
        output = Dense(config, compute, (heads, size), (hidden,), ("heads", "kv", "embed"), name="output")
        return output.product(context, dropout_keys), output.bias, cache


def fuses(config: BertConfig, compute: Compute, length: int) -> bool:
    """Returns whether self-attention over `length` tokens runs as the TPU kernel, which supports some sizes only."""
    width = config.hidden_size // parts_along("heads")  # hidden size per device
    if length % LANES or length > LONGEST or width % LANES or LANES % config.head_size:
        return False
    is_wanted = config.attention == "fused" or (config.attention == "auto" and has_kernels(compute.chip))
    return is_wanted and not triton.is_supported(compute.chip)
