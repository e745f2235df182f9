"""Rotary position embeddings (RoFormer; Su et al. 2021).

Queries and keys are rotated by angles that grow with the position, so that their products depend on distances only.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array


class Rotation(NamedTuple):
    """Cosines and sines of the angles of tokens, `[batch, length, size / 2]`, float32."""

    cosines: Array
    sines: Array


def rotation(positions: Array, frequencies: Any, factor: float = 1.0) -> Rotation:
    """Returns the rotation of heads at positions.

    Args:
      positions: `[batch, length]`, within the sequences.
      frequencies: the radians per position of each pair, float32 `[size / 2]`.
      factor: multiplies cosines and sines.
    """
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return Rotation(
        *(function(angles) * factor if factor != 1 else function(angles) for function in (jnp.cos, jnp.sin))
    )


def rotate(query_key_value: Array, by: Rotation) -> Array:
    """Rotates queries and keys, in float32: `[batch, length, 3, heads, size]` -> the same.

    Pairs are the elements i and i + size / 2 of a head (the order of GPT-NeoX and transformers), not neighbours.
    """
    turned, values = query_key_value[:, :, :2].astype(jnp.float32), query_key_value[:, :, 2:]
    first, second = jnp.split(turned, 2, axis=-1)
    cosines, sines = (x[:, :, None, None] for x in by)
    turned = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return jnp.concatenate([turned.astype(query_key_value.dtype), values], axis=2)
