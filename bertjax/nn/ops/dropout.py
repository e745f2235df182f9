"""Dropout with a mask per batch row, so that the mesh and the number of microbatches do not change it."""

import math

import jax
import jax.numpy as jnp


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """Derives keys `[rows]` from the key of a step and the indices `[rows]` of rows in the global batch."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, rows)


def fold_in(keys: jax.Array | None, number: int | jax.Array) -> jax.Array | None:
    """Derives the keys `[rows]` of a layer, or of one of its dropout sites; None stays None."""
    return None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, number)


def dropout(x: jax.Array, rate: float, keys: jax.Array | None, start: int | jax.Array = 0) -> jax.Array:
    """Zeroes each element of x `[rows, ...]` with probability `rate` and scales up the rest; `keys` None: no dropout.

    `start`: the index of x's first element in its row, if x is a part of the rows.

    `keys` `[rows]` must come from `jax.random.fold_in` or `split`, as those of `row_keys` and `fold_in` do. Keys with
    consecutive data (0, 1, 2, ...) give correlated masks; see `hash_index`.
    """
    if keys is None or rate == 0:
        return x
    kept = jax.vmap(lambda key: _hashes(key, x.shape[1:], start))(keys) >= jnp.uint32(threshold(rate))
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def threshold(rate: float) -> int:
    """Returns the number below which the hash of an element's index drops it."""
    return int(rate * 2**32)


def random_bits(key: jax.Array, shape: tuple[int, ...], start: int | jax.Array) -> jax.Array:
    """32 random bits for each index of an array, of its row-major index, which begins at `start`; for `key` see
    `dropout`."""
    x = _hashes(key, shape, start)
    return x ^ (x >> 16)


def _hashes(key, shape, start):
    """`hash_index` of the row-major index of each element of an array."""
    first, second = jax.random.key_data(key)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    index = jnp.uint32(start)
    index += sum(jax.lax.broadcasted_iota(jnp.uint32, shape, i) * jnp.uint32(s) for i, s in enumerate(strides))
    return hash_index(index, first, second)


def hash_index(index: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """A hash of each uint32 index and of the two uint32 words of a key: the upper half of its 32 bits is random.

    With jax.random.bits, which takes twenty rounds per number, dropout takes a quarter of BERT-base's step on a TPU.
    This hash has two multiply-xorshift rounds (with the constants of Wellons's lowbias32; what it does after them
    changes only the lower half, which for dropout hardly matters). It mixes the index well but the key poorly: the
    first word only permutes the indices, and the second goes through one round. So the words must already be random,
    as Threefry makes them in `jax.random.fold_in`.

    GPUs take as long for each of its shifts and exclusive ors as for a bound's comparison, so that attention there is
    as fast as this is short.
    """
    return hash_folded(folded(index ^ first), second)


def folded(x: jax.Array) -> jax.Array:
    """The first xorshift of `hash_index`: `folded(a ^ b)` is `folded(a) ^ folded(b)`."""
    return x ^ (x >> 16)


def hash_folded(x: jax.Array, second: jax.Array) -> jax.Array:
    """The rest of `hash_index`."""
    x = x * jnp.uint32(0x7FEB352D) + second
    return (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
