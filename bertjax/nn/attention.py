"""Multi-head self-attention (Vaswani et al. 2017, section 3.2), restricted to tokens of the same segment, and in a
causal model to earlier ones."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import BertConfig, Compute, ModelConfig
from bertjax.nn.kernels import triton
from bertjax.nn.kernels.fused_attention import LONGEST, fused_attention
from bertjax.nn.kernels.fused_norm import can_add_norm, fused_add_norm
from bertjax.nn.kernels.gpu_attention import can_attend_on_gpu, gpu_attention
from bertjax.nn.kernels.gpu_norm import can_norm_on_gpu, gpu_add_norm, gpu_norm, gpu_sum_and_norm
from bertjax.nn.kernels.pallas import LANES, has_kernels, on_one_device, parts_along
from bertjax.nn.ops import low_rank
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.matmul import project
from bertjax.nn.ops.plain_attention import Cache, cached_attention, plain_attention
from bertjax.nn.ops.tiles import tile_of


class Dense(nn.Module):
    """x W + b over the last dimension of x, which W sees as `inputs`; `axes` are the logical axes of W.

    Args:
      use_bias: if not, there is no b.
      init_scale: multiplies the standard deviation of W's initial values.
    """

    config: ModelConfig
    compute: Compute
    inputs: tuple[int, ...]
    features: tuple[int, ...]
    axes: tuple[str | None, ...]
    use_bias: bool = True
    init_scale: float = 1.0

    def setup(self):
        init = nn.initializers.truncated_normal(self.config.initializer_range * self.init_scale)
        kernel_init = nn.with_logical_partitioning(init, self.axes)
        bias_init = nn.with_logical_partitioning(nn.initializers.zeros, self.axes[len(self.inputs) :])
        self.kernel = self.param("kernel", kernel_init, self.inputs + self.features)
        self.bias = self.param("bias", bias_init, self.features) if self.use_bias else None
        self.updated = low_rank.targeted(self.compute.lora, self.path)
        if self.updated:
            shapes, axes = low_rank.shapes_of(
                self.path, self.updated, self.inputs, self.features, self.axes, self.compute.lora
            )
            init_a = nn.with_logical_partitioning(low_rank.init_a, axes[0])
            init_b = nn.with_logical_partitioning(nn.initializers.zeros, axes[1])
            self.lora_a = self.param("lora_a", init_a, shapes[0], math.prod(self.inputs))
            self.lora_b = self.param("lora_b", init_b, shapes[1])

    def __call__(self, x, keys=None):
        product = self.product(x, keys)
        return product + self.bias.astype(self.compute.dtype) if self.use_bias else product

    def product(self, x, keys=None):
        """Returns x W, with the update of W if it has one, whose dropout takes the layer's `keys` `[batch]`."""
        found = project(x, self.kernel.reshape(-1, *self.features), self.compute)
        return found + self._update(x, keys) if self.updated else found

    def _update(self, x, keys):
        lora = self.compute.lora
        x = dropout(x, lora.dropout, fold_in(keys, low_rank.site_of(self.path)))
        a = self.lora_a.reshape(x.shape[-1], -1, lora.rank)
        b = self.lora_b.reshape(a.shape[1], lora.rank, -1).astype(self.compute.dtype)
        found = lora.scale * jnp.einsum("...nr,nrf->...nf", project(x, a, self.compute), b)
        if low_rank.stacked(self.path):
            whole = jnp.zeros((*found.shape[:-2], self.features[0], found.shape[-1]), found.dtype)
            found = whole.at[..., jnp.array(self.updated), :].set(found)
        return found.reshape(*x.shape[:-1], *self.features)

    def can_merge(self, keys) -> bool:
        """Whether `merged` is all that x is multiplied by: dropout is that of the update's x only."""
        return not self.updated or keys is None or self.compute.lora.dropout == 0

    def merged(self):
        """Returns W with its update, for what multiplies by it in a kernel."""
        if not self.updated:
            return self.kernel
        update = low_rank.product(self.lora_a, self.lora_b, self.updated, low_rank.stacked(self.path))
        return self.kernel + self.compute.lora.scale * update


class LayerNorm(nn.Module):
    """LayerNorm over the last axis, of `size`, or of hidden states.

    Statistics in float32 and two passes: a single pass loses precision.
    """

    config: ModelConfig
    compute: Compute
    use_bias: bool = True
    size: int | None = None

    def setup(self):
        size = (self.size or self.config.hidden_size,)
        self.scale = self.param("scale", nn.with_logical_partitioning(nn.initializers.ones, ("embed",)), size)
        if self.use_bias:
            self.bias = self.param("bias", nn.with_logical_partitioning(nn.initializers.zeros, ("embed",)), size)

    def __call__(self, x):
        """`[..., hidden]` -> `[..., hidden]`."""
        epsilon, chip = self.config.layer_norm_eps, self.compute.chip
        if x.ndim == 3 and can_norm_on_gpu(self.compute, *x.shape[1:]):
            return gpu_norm(
                x.astype(self.compute.dtype), self.scale, self.bias if self.use_bias else None, epsilon, chip
            )
        scaled = standardize(x, epsilon, chip) * self.scale
        return (scaled + self.bias if self.use_bias else scaled).astype(self.compute.dtype)

    def of_sum(self, x, update, update_bias, dropout_keys):
        """Normalizes x + dropout(update + update_bias): `[batch, length, hidden]`, keys `[batch]` or None."""
        rate, epsilon, chip = self.config.hidden_dropout_prob, self.config.layer_norm_eps, self.compute.chip
        if has_kernels(chip) and can_add_norm(*x.shape[1:]):
            return fused_add_norm(x, update, update_bias, self.scale, self.bias, dropout_keys, rate, epsilon, chip)
        if can_norm_on_gpu(self.compute, *x.shape[1:]):
            return gpu_add_norm(x, update, update_bias, self.scale, self.bias, dropout_keys, rate, epsilon, chip)
        return self(residual_sum(x, update, update_bias, dropout_keys, rate))

    def and_sum(self, x, update, update_bias, dropout_keys, rate: float):
        """Returns the sum x + dropout(update + update_bias), `[batch, length, hidden]`, and it normalized.

        The bias may be None, and so may be the keys `[batch]`.
        """
        epsilon, chip = self.config.layer_norm_eps, self.compute.chip
        if can_norm_on_gpu(self.compute, *x.shape[1:]):
            bias, how = self.bias if self.use_bias else None, (dropout_keys, rate, epsilon, chip)
            return gpu_sum_and_norm(x, update, update_bias, self.scale, bias, *how)
        total = residual_sum(x, update, update_bias, dropout_keys, rate)
        return total, self(total)


class RMSNorm(nn.Module):
    """LayerNorm without mean and bias (Zhang and Sennrich 2019), over the last axis; statistics in float32."""

    config: ModelConfig
    compute: Compute

    @nn.compact
    def __call__(self, x):
        """`[..., hidden]` -> `[..., hidden]`."""
        init = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        scale = self.param("scale", init, (self.config.hidden_size,))
        scaled = divide_by_rms(x, self.config.rms_norm_eps, self.compute.chip) * scale
        return scaled.astype(self.compute.dtype)


def residual_sum(x, update, update_bias, dropout_keys, rate: float):
    """x + dropout(update + update_bias): `[batch, length, hidden]`, keys `[batch]` or None, and so may be the bias."""
    update = update if update_bias is None else update + update_bias.astype(update.dtype)
    return x + dropout(update, rate, dropout_keys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def standardize(x, epsilon: float, chip: str = ""):
    """Subtracts the mean over the last axis and divides by the standard deviation, in float32.

    Its gradient in closed form needs x and two numbers per row; the derived one reads and keeps much more.
    """
    return _standardize_forward(x, epsilon, chip)[0]


def _standardize_forward(x, epsilon, chip):
    mean = _mean(x.astype(jnp.float32), chip)
    inverse = jax.lax.rsqrt(_mean(jnp.square(x - mean), chip) + epsilon)
    return (x - mean) * inverse, (x, mean, inverse)


def _standardize_backward(epsilon, chip, saved, grad):
    del epsilon
    x, mean, inverse = saved
    y = (x - mean) * inverse
    return ((inverse * (grad - _mean(grad, chip) - y * _mean(grad * y, chip))).astype(x.dtype),)


standardize.defvjp(_standardize_forward, _standardize_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def divide_by_rms(x, epsilon: float, chip: str = ""):
    """Divides by the root of the mean square over the last axis, in float32; its gradient is as `standardize`'s."""
    return _divide_forward(x, epsilon, chip)[0]


def _divide_forward(x, epsilon, chip):
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(_mean(jnp.square(wide), chip) + epsilon)
    return wide * inverse, (x, inverse)


def _divide_backward(epsilon, chip, saved, grad):
    del epsilon
    x, inverse = saved
    y = x * inverse
    return ((inverse * (grad - y * _mean(grad * y, chip))).astype(x.dtype),)


divide_by_rms.defvjp(_divide_forward, _divide_backward)


def _mean(x, chip: str):
    """The mean over the last axis, which stays; on a CPU as a product, with which LayerNorm takes half the time."""
    if chip != "cpu":
        return x.mean(-1, keepdims=True)
    share = jnp.full(x.shape[-1:], 1 / x.shape[-1], x.dtype)
    return jnp.einsum("...h,h->...", x, share, precision="highest")[..., None]


class SelfAttention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V with dropout on the probabilities, then the output projection."""

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(self, x, segments, dropout_keys=None, cache: Cache | None = None):
        """Returns the output projection's product `[batch, length, hidden]`, its bias, which is not added yet, and the
        cache with these tokens.

        `x` is `[batch, length, hidden]`, `segments` `[batch, length]`; with a cache they are the tokens' positions
        `[length]` instead, see `cached_attention`.
        """
        config, compute, dtype = self.config, self.compute, self.compute.dtype
        hidden, heads, size = config.hidden_size, config.num_attention_heads, config.head_size
        axes = ("embed", "projections", "heads", "kv")
        project = Dense(config, compute, (hidden,), (3, heads, size), axes, name="query_key_value")
        rate = config.attention_probs_dropout_prob
        if cache is not None:
            context, cache = cached_attention(project(x), segments, cache)
        elif config.attention != "xla" and can_attend_on_gpu(compute, x.shape[1], size):
            how = dict(chip=compute.chip, causal=config.causal)
            context = gpu_attention(project(x, dropout_keys), segments, dropout_keys, rate, **how)
        elif fuses(config, compute, x.shape[1]) and project.can_merge(dropout_keys):
            kernel, bias = project.merged().astype(dtype), project.bias.astype(dtype)
            how = dict(chip=compute.chip, unroll=compute.unroll, causal=config.causal)
            context = fused_attention(x, kernel, bias, segments, dropout_keys, rate, **how)
        else:
            has_cache = compute.chip == "cpu" and on_one_device()  # several would have to fetch each other's tiles
            tile = tile_of(*x.shape[:2], heads) if has_cache else None
            read = project(x, dropout_keys)
            context = plain_attention(read, segments, dropout_keys, rate, compute, config.causal, tile)
        output = Dense(config, compute, (heads, size), (hidden,), ("heads", "kv", "embed"), name="output")
        return output.product(context, dropout_keys), output.bias, cache


def fuses(config: BertConfig, compute: Compute, length: int) -> bool:
    """Returns whether self-attention over `length` tokens runs as the TPU kernel; other lengths and sizes cannot."""
    width = config.hidden_size // parts_along("heads")  # hidden size per device
    if (
        length % LANES
        or length > LONGEST
        or width % LANES
        or LANES % config.head_size
        or triton.is_supported(compute.chip)
    ):
        return False
    return config.attention == "fused" or (config.attention == "auto" and has_kernels(compute.chip))
