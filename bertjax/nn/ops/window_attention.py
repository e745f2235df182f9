"""Self-attention within a window: a token attends to near tokens in its segment.

The cost grows with length x window. Queries are divided into blocks of half a window. The queries of a block meet the
keys of their block and of its two neighbours, and a mask selects the near keys.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute
from bertjax.nn.ops.tiled_attention import AttentionLayout, Settings, attend_in_layout
from bertjax.nn.ops.tiles import Tile


def window_attention(
    query_key_value: Array, segments: Array, half: int, compute: Compute, tile: Tile | None = None
) -> Array:
    """Queries, keys, values `[batch, length, 3, heads, size]` -> `[batch, length, heads * size]`.

    Args:
      query_key_value: the queries, keys and values.
      segments: `[batch, length]`. Tokens attend within their segment, whose tokens are consecutive.
      half: the largest distance to a token, to either side.
      compute: the dtypes.
      tile: see `tiled_attention.Settings`.
    """
    length = segments.shape[1]
    missing = -length % half  # padding, which has another segment
    padded = jnp.pad(query_key_value, [(0, 0), (0, missing), (0, 0), (0, 0), (0, 0)])
    segments = jnp.pad(segments, [(0, 0), (0, missing)], constant_values=-1)
    settings = Settings(0.0, compute, Blocks(half), tile)
    context = attend_in_layout(padded, segments, None, None, settings)[:, :length]
    return context.reshape(*context.shape[:2], -1)


@dataclasses.dataclass(frozen=True)
class Blocks(AttentionLayout):
    """The layout in which a block of `half` queries meets the keys of three blocks."""

    half: int

    def by_head(self, x: Array) -> Array:
        """`[batch, length, heads, size]` -> `[batch, heads, blocks, half, size]`."""
        batch, length, heads, size = x.shape
        return jnp.moveaxis(x.reshape(batch, length // self.half, self.half, heads, size), 3, 1)

    def by_token(self, x: Array) -> Array:
        """`[batch, heads, blocks, half, size]` -> `[batch, length, heads, size]`."""
        x = jnp.moveaxis(x, 1, 3)
        return x.reshape(x.shape[0], -1, *x.shape[3:])

    def keys_of(self, x: Array) -> Array:
        """Joins each block with its neighbours: `[..., blocks, 3 * half, size]`, with zeros at the ends."""
        padded = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(1, 1), (0, 0), (0, 0)])
        return jnp.concatenate([padded[..., :-2, :, :], x, padded[..., 2:, :, :]], axis=-2)

    def sum_keys(self, x: Array) -> Array:
        """The transpose of `keys_of`: `[..., blocks, 3 * half, size]` -> `[..., blocks, half, size]`."""
        before, middle, after = jnp.split(x, 3, axis=-2)
        ends = [(0, 0)] * (x.ndim - 3)
        from_next = jnp.pad(before[..., 1:, :, :], [*ends, (0, 1), (0, 0), (0, 0)])
        from_last = jnp.pad(after[..., :-1, :, :], [*ends, (1, 0), (0, 0), (0, 0)])
        return middle + from_next + from_last

    def visible(self, segments: Array) -> Array:
        """Returns the mask of segments `[batch, length]`: booleans `[batch, 1, blocks, half, 3 * half]`.

        Padding attends to padding, so that no row of the softmax is empty. No other token attends to padding.
        """
        block = segments.reshape(segments.shape[0], -1, self.half)
        near = jnp.pad(block, [(0, 0), (1, 1), (0, 0)], constant_values=-2)
        near = jnp.concatenate([near[:, :-2], block, near[:, 2:]], axis=-1)
        distance = jnp.arange(3 * self.half) - self.half - jnp.arange(self.half)[:, None]
        return ((block[..., None] == near[:, :, None]) & (jnp.abs(distance) <= self.half))[:, None]
