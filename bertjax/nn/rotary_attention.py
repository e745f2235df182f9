"""Self-attention with rotated queries and keys: the choice of an implementation, and attention with shared keys."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute
from bertjax.nn.attention import Dense
from bertjax.nn.kernels.flash_attention import can_flash, flash_attention
from bertjax.nn.kernels.gpu_attention import can_attend_on_gpu, gpu_attention
from bertjax.nn.kernels.pallas import has_kernels, on_one_device
from bertjax.nn.ops.plain_attention import plain_attention
from bertjax.nn.ops.rotary import Rotation, rotate
from bertjax.nn.ops.tiles import tile_of
from bertjax.nn.ops.window_attention import window_attention

BLOCKS = 6  # windows of the shortest text for which blocks are faster than all scores and a mask


def attend_rotary(turned: Array, segments: Array, compute: Compute, window: int | None = None) -> Array:
    """Attends without TPU kernels.

    Args:
      turned: rotated queries and keys, and values, `[batch, length, 3, heads, size]`.
      segments: `[batch, length]`. Tokens attend within their segment, whose tokens are consecutive.
      compute: the dtypes and the chip.
      window: the largest distance to a token, to either side; None: any distance.

    Returns:
      The context `[batch, length, heads * size]`.
    """
    turned = nn.with_logical_constraint(turned, ("batch", "length", None, "heads", "kv"))
    batch, length, _, heads, size = turned.shape
    if can_attend_on_gpu(compute, length, size):
        return gpu_attention(turned, segments, chip=compute.chip, window=window)
    tiles = compute.chip == "cpu" and on_one_device()  # devices would have to exchange tiles
    is_symbolic = not isinstance(length, int)  # a program for any length (`jax.export`)
    if window is None or is_symbolic or length < BLOCKS * window:
        tile = tile_of(batch, length, heads) if tiles else None
        return plain_attention(turned, segments, None, 0.0, compute, tile=tile, window=window)
    tile = tile_of(batch, length, heads, 3 * window) if tiles else None
    return window_attention(turned, segments, window, compute, tile)


class GroupedAttention(nn.Module):
    """Self-attention in which groups of heads share a key and a value (Ainslie et al. 2023), without biases or dropout.

    `config.num_key_value_heads` divides `config.num_attention_heads`. Keys and values are repeated for the heads of
    their groups. For the TPU kernel, which also projects, the matrices of the projections are repeated.
    """

    config: Any
    compute: Compute

    @nn.compact
    def __call__(self, x: Array, turn: Rotation, segments: Array, keys: Array | None = None) -> Array:
        """`[batch, length, hidden]`, segments `[batch, length]`, keys `[batch]` -> `[batch, length, hidden]`."""
        config, compute = self.config, self.compute
        hidden, heads, size = (config.hidden_size,), config.num_attention_heads, config.head_size
        shared, axes = (2, config.num_key_value_heads, size), ("embed", "projections", "heads", "kv")
        query = Dense(config, compute, hidden, (heads, size), ("embed", "heads", "kv"), use_bias=False, name="query")
        key_value = Dense(config, compute, hidden, shared, axes, use_bias=False, name="key_value")
        can_merge = query.can_merge(keys) and key_value.can_merge(keys)
        if has_kernels(compute.chip) and can_flash(x.shape[1], heads * size, size) and can_merge:
            kernel = joined(query.merged(), key_value.merged()).astype(compute.dtype)
            context = flash_attention(x, kernel, None, turn, segments, compute.chip)
        else:
            context = attend_rotary(rotate(joined(query(x, keys), key_value(x, keys)), turn), segments, compute)
        output = Dense(config, compute, (heads, size), hidden, ("heads", "kv", "embed"), use_bias=False, name="output")
        return output(context, keys)


def joined(query: Array, key_value: Any) -> Array:
    """Queries `[..., heads, size]`, shared keys and values `[..., 2, groups, size]` -> `[..., 3, heads, size]`."""
    repeated = jnp.repeat(key_value, query.shape[-2] // key_value.shape[-2], axis=-2)
    return jnp.concatenate([query[..., None, :, :], repeated], axis=-3)
