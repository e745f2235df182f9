"""Self-attention whose queries and keys are rotated: what computes it where, and the form in which heads share keys."""

import flax.linen as nn
import jax.numpy as jnp

from bertjax.config.model_config import Compute
from bertjax.nn.attention import Dense
from bertjax.nn.kernels.flash_attention import can_flash, flash_attention
from bertjax.nn.kernels.gpu_attention import can_attend_on_gpu, gpu_attention
from bertjax.nn.kernels.pallas import has_kernels, on_one_device
from bertjax.nn.ops.plain_attention import plain_attention
from bertjax.nn.ops.rotary import Rotation, rotate
from bertjax.nn.ops.tiles import tile_of
from bertjax.nn.ops.window_attention import window_attention

BLOCKS = 6  # From so many windows on, blocks of three pay; shorter texts have all scores and a mask.


def attend(turned, segments, compute: Compute, window: int | None = None):
    """Without TPU kernels: rotated queries and keys, and values -> what each token sees of the values.

    Args:
      turned: `[batch, length, 3, heads, size]`.
      segments: `[batch, length]`; tokens see their own segment only, whose tokens lie side by side.
      window: how many places away a token sees, to either side; None: any number.

    Returns:
      `[batch, length, heads * size]`.
    """
    turned = nn.with_logical_constraint(turned, ("batch", "length", None, "heads", "kv"))
    batch, length, _, heads, size = turned.shape
    if can_attend_on_gpu(compute, length, size):
        return gpu_attention(turned, segments, chip=compute.chip, window=window)
    has_cache = compute.chip == "cpu" and on_one_device()  # several would have to fetch each other's tiles
    is_symbolic = not isinstance(length, int)  # a program for any length (`jax.export`) cannot choose by it
    if window is None or is_symbolic or length < BLOCKS * window:
        tile = tile_of(batch, length, heads) if has_cache else None
        return plain_attention(turned, segments, None, 0.0, compute, tile=tile, window=window)
    tile = tile_of(batch, length, heads, 3 * window) if has_cache else None
    return window_attention(turned, segments, window, compute, tile)


class GroupedAttention(nn.Module):
    """Self-attention in which groups of heads share a key and a value (Ainslie et al. 2023), without biases or dropout.

    `config.num_key_value_heads` divides `config.num_attention_heads`. Keys and values are repeated for the heads of
    their groups before they meet the queries; the TPU kernel, which projects by itself, is given repeated matrices.
    """

    config: object
    compute: Compute

    @nn.compact
    def __call__(self, x, turn: Rotation, segments, keys=None):
        """`[batch, length, hidden]`, segments `[batch, length]`, keys `[batch]` -> `[batch, length, hidden]`."""
        config, compute = self.config, self.compute
        hidden, heads, size, shared = (config.hidden_size,), config.num_attention_heads, config.head_size, (
            2, config.num_key_value_heads, config.head_size,
        )  # fmt: skip
        axes = ("embed", "projections", "heads", "kv")
        query = Dense(config, compute, hidden, (heads, size), ("embed", "heads", "kv"), use_bias=False, name="query")
        key_value = Dense(config, compute, hidden, shared, axes, use_bias=False, name="key_value")
        can_merge = query.can_merge(keys) and key_value.can_merge(keys)
        if has_kernels(compute.chip) and can_flash(x.shape[1], heads * size, size) and can_merge:
            kernel = joined(query.merged(), key_value.merged()).astype(compute.dtype)
            context = flash_attention(x, kernel, None, turn, segments, compute.chip)
        else:
            context = attend(rotate(joined(query(x, keys), key_value(x, keys)), turn), segments, compute)
        axes = ("heads", "kv", "embed")
        return Dense(config, compute, (heads, size), hidden, axes, use_bias=False, name="output")(context, keys)


def joined(query, key_value):
    """`[..., heads, size]` and the `[..., 2, groups, size]` that heads share -> `[..., 3, heads, size]`."""
    repeated = jnp.repeat(key_value, query.shape[-2] // key_value.shape[-2], axis=-2)
    return jnp.concatenate([query[..., None, :, :], repeated], axis=-3)
