"""Dropout with a mask per batch row, so that the mesh and the number of microbatches do not change it."""

import math

import jax
import jax.numpy as jnp
from jax import Array


def row_keys(key: Array, rows: Array) -> Array:
    """Derives keys `[rows]` from the key of a step and the indices `[rows]` of rows in the global batch."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def fold_in(keys: Array | None, number: int | Array) -> Array | None:
    """Derives the keys `[rows]` of a layer, or of a dropout site in a layer; returns None for None."""
    return None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def dropout(x: Array, rate: float, keys: Array | None, start: int | Array = 0) -> Array:
    """Zeroes the elements of x `[rows, ...]` with probability `rate` and scales up the rest.

    Args:
      x: the array.
      rate: the probability.
      keys: `[rows]`, from `row_keys`, `fold_in` or `jax.random.split`; None: no dropout. Keys with consecutive data (0,
        1, 2, ...) give correlated masks, see `hash_index`.
      start: the index of the first element of x in its row, if x is a part of the rows.
    """
    if keys is None or rate == 0:
        return x
    kept = jax.vmap(lambda key: _hashes(key, x.shape[1:], start))(keys) >= jnp.uint32(threshold(rate))
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def threshold(rate: float) -> int:
    """Returns the number below which the hash of an element's index drops it."""
    return int(rate * 2**32)


def random_bits(key: Array, shape: tuple[int, ...], start: int | Array) -> Array:
    """Returns 32 random bits for each row-major index of an array, beginning at `start`; for `key` see `dropout`."""
    x = _hashes(key, shape, start)
    return x ^ (x >> 16)


def _hashes(key: Array, shape: tuple[int, ...], start: int | Array) -> Array:
    """Returns `hash_index` of the row-major indices of an array."""
    first, second = jax.random.key_data(key)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    index = jnp.uint32(start)
    index += sum(jax.lax.broadcasted_iota(jnp.uint32, shape, i) * jnp.uint32(s) for i, s in enumerate(strides))
    return hash_index(index, first, second)


def hash_index(index: Array, first: Array, second: Array) -> Array:
    """Returns a hash of uint32 indices and of the two uint32 words of a key; the upper half of the 32 bits is random.

    With jax.random.bits, which takes twenty rounds per number, dropout takes a quarter of a step of BERT-base on a TPU.
    This hash has two multiply-xorshift rounds with the constants of Wellons's lowbias32. It omits the last operation of
    lowbias32, which changes only the lower half of the bits. The hash mixes the index well, but the key poorly: the
    first word permutes the indices, and the second word takes part in one round. Therefore the words must be random, as
    the words of `jax.random.fold_in` are.

    On GPUs each shift and exclusive or takes the time of a comparison, so that a short hash makes attention faster.
    """
    return hash_folded(folded(index ^ first), second)


def folded(x: Array) -> Array:
    """Returns the first xorshift of `hash_index`. The fold of a ^ b is the exclusive or of the folds of a and b."""
    return x ^ (x >> 16)


def hash_folded(x: Array, second: Array) -> Array:
    """Returns the result of `hash_index` for a folded index."""
    x = x * jnp.uint32(0x7FEB352D) + second
    return (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
