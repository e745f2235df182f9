"""Dropout whose masks belong to the rows of a batch: the same on any mesh, and in any number of microbatches."""

import math

import jax
import jax.numpy as jnp


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """A key for each row `[rows]` of a global batch, from that of the step."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def fold_in(keys: jax.Array | None, number: int | jax.Array) -> jax.Array | None:
    """The keys of a layer, or of one of its dropouts; None stays None."""
    return None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None) -> jax.Array:
    """Zeroes each number of x `[rows, ...]` with probability `rate`, and scales the others up. None: no dropout.

    `keys` `[rows]` must come from `jax.random.fold_in` or `split`, as those of `row_keys` and `fold_in` do. Keys that
    are numbered by hand (words 0, 1, 2, ...) give masks that are correlated; see `_bits`.
    """
    if keys is None or rate == 0:
        return x
    kept = jax.vmap(lambda key: _bits(key, x.shape[1:]))(keys) >= jnp.uint32(rate * 2**32)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """32 random bits for each index: a hash of the index and a key's two words.

    With jax.random.bits, which spends twenty rounds on a number, dropout takes a quarter of BERT-base's step on a TPU.
    These are two rounds of multiplying and folding (the constants are Wellons's lowbias32). They mix the index well,
    but the key's words little: the first one only permutes the indices, and the second one goes through one round.
    So the words have to be random numbers already, as Threefry makes them in `jax.random.fold_in`.
    """
    first, second = jax.random.key_data(key)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    index = sum(jax.lax.broadcasted_iota(jnp.uint32, shape, i) * jnp.uint32(s) for i, s in enumerate(strides))
    x = index ^ first
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) + second
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
