"""Checksums of the values of arrays, which are equal on all meshes, so that every reader of a checkpoint can compare.

The checksum is the sum modulo 2**32 of the bits of all elements, multiplied by odd numbers that grow with the index of
the element. A sum of integers does not depend on the order, and therefore not on the sharding. The checksum detects
every change of a single element of at most 32 bits.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PART = 1 << 20  # elements of a NumPy array at a time


def arrays_by_name(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by path, such as "bert/pooler/dense/kernel"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def of_tree(tree: Any) -> dict[str, int]:
    """Returns the checksums of arrays by name.

    NumPy computes the checksums of arrays on CPUs, because compilation would take longer.
    """
    arrays = arrays_by_name(tree)
    if all(_is_in_memory(x) for x in arrays.values()):
        return {name: of_numpy(np.asarray(x)) for name, x in arrays.items()}
    return {name: int(x) for name, x in jax.device_get(of_sharded(tree)).items()}


def _is_in_memory(x: jax.Array | np.ndarray) -> bool:
    """Returns whether this process can read all elements of an array without a copy from a device."""
    if not isinstance(x, jax.Array):
        return True
    return x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())


@jax.jit
def of_sharded(tree: Any) -> dict[str, jax.Array]:
    """Returns the uint32 checksums of sharded arrays by name."""
    return {name: _on_devices(x) for name, x in arrays_by_name(tree).items()}


def _on_devices(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    bits = jax.lax.bitcast_convert_type(x, _unsigned(x.dtype)).astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        stride = math.prod(x.shape[axis + 1 :]) % 2**32
        index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride)
    return (bits * (2 * index + 1)).sum(dtype=jnp.uint32)


def of_numpy(x: np.ndarray) -> int:
    """Returns the checksum of a NumPy array."""
    bits, total = np.ascontiguousarray(x).reshape(-1).view(_unsigned(x.dtype)), 0
    for first in range(0, len(bits), PART):
        part = bits[first : first + PART].astype(np.uint32)
        odd = 2 * np.arange(first, first + len(part), dtype=np.int64) + 1
        total += int((part * odd.astype(np.uint32)).sum(dtype=np.uint32))
    return total % 2**32


def _unsigned(dtype: Any) -> np.dtype:
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
