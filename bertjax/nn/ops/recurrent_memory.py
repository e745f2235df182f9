"""What the rows of a batch remember for the next step, where they go on: the states that each layer has read
(Transformer-XL's segment recurrence; Dai et al. 2019, section 3.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Memory(NamedTuple):
    """The states that each layer has read last. They have no gradient."""

    states: jax.Array  # [rows, layers, memory, hidden]
    filled: jax.Array  # [rows] int32: how many there are in the memory, at its end

    def where(self, goes_on: jax.Array) -> "Memory":
        """Returns the memory without that of rows that do not go on, `goes_on` `[rows]`."""
        return self._replace(filled=jnp.where(goes_on, self.filled, 0))

    def by_layer(self) -> jax.Array:
        """Returns the states `[layers, rows, memory, hidden]`, without a gradient."""
        return jax.lax.stop_gradient(jnp.moveaxis(self.states, 1, 0))

    def seen_with(self, mask: jax.Array) -> jax.Array:
        """Returns a mask `[rows, 1, queries, memory + keys]` of one without memory, all of which the queries see."""
        count = self.states.shape[2]
        is_there = jnp.arange(count) >= count - self.filled[:, None]
        is_there = jnp.broadcast_to(is_there[:, None, None], (*mask.shape[:3], count))
        return jnp.concatenate([is_there, mask], axis=-1)

    def after(self, states: jax.Array, length: int) -> "Memory":
        """Returns the memory after `length` tokens, of which each layer has left `states` `[layers, rows, memory,
        hidden]`."""
        filled = jnp.minimum(self.filled + length, self.states.shape[2])
        return Memory(jnp.moveaxis(states, 0, 1).astype(self.states.dtype), filled)


def new_memory(rows: int, layers: int, length: int, hidden: int, dtype) -> Memory:
    """Returns the memory of rows that remember nothing."""
    return Memory(jnp.zeros((rows, layers, length, hidden), dtype), jnp.zeros([rows], jnp.int32))


def last_states(memory: jax.Array, read: jax.Array) -> jax.Array:
    """Returns the last of the states in a layer's memory `[rows, memory, hidden]` and of those that it has read after
    them `[rows, length, hidden]`, as many as the memory has, without a gradient."""
    return jax.lax.stop_gradient(jnp.concatenate([memory, read], axis=1)[:, -memory.shape[1] :])
