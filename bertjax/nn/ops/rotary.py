"""Rotary position embeddings (RoFormer; Su et al. 2021): queries and keys are rotated by angles that grow with the
position, so that their products depend on distances only."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rotation(NamedTuple):
    """Cosines and sines of the angles of each token, `[batch, length, size / 2]`, float32."""

    cosines: jax.Array
    sines: jax.Array


def rotation(positions: jax.Array, size: int, theta: float) -> Rotation:
    """Returns the rotation of heads of a `size`: `theta ** (-2 i / size)` radians a position for the pair i.

    Args:
      positions: `[batch, length]`, within the sequences.
    """
    frequencies = theta ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(query_key_value: jax.Array, by: Rotation) -> jax.Array:
    """Rotates queries and keys, in float32: `[batch, length, 3, heads, size]` -> the same.

    Pairs are the elements i and i + size / 2 of a head (GPT-NeoX's order, as in transformers), not neighbours.
    """
    turned, values = query_key_value[:, :, :2].astype(jnp.float32), query_key_value[:, :, 2:]
    first, second = jnp.split(turned, 2, axis=-1)
    cosines, sines = (x[:, :, None, None] for x in by)
    turned = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return jnp.concatenate([turned.astype(query_key_value.dtype), values], axis=2)
