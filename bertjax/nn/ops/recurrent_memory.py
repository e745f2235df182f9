"""The recurrent memory of a batch: hidden states of earlier tokens, which layers read as further keys and values.

The segment recurrence of Transformer-XL (Dai et al. 2019, section 3.2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class RecurrentMemory(NamedTuple):
    """The last hidden states that each layer read. Gradients do not flow into the memory.

    Attributes:
      states: `[rows, layers, memory, hidden]`.
      filled: int32 `[rows]`: the number of valid states, which are at the end of the memory.
    """

    states: Array
    filled: Array

    def where(self, continues: Array) -> "RecurrentMemory":
        """Returns the memory with no hidden states for the rows that start a new text.

        Args:
          continues: booleans `[rows]`: whether the text of a row continues.
        """
        return self._replace(filled=jnp.where(continues, self.filled, 0))

    def by_layer(self) -> Array:
        """Returns the hidden states `[layers, rows, memory, hidden]`, without a gradient."""
        return jax.lax.stop_gradient(jnp.moveaxis(self.states, 1, 0))

    def extend_mask(self, mask: Array) -> Array:
        """Returns an attention mask for the keys of the memory and the keys of the row.

        Args:
          mask: booleans `[rows or 1, 1, queries, keys]`.

        Returns:
          Booleans `[rows, 1, queries, memory + keys]`. All queries see the valid hidden states.
        """
        count = self.states.shape[2]
        is_valid = jnp.arange(count) >= count - self.filled[:, None]
        is_valid = jnp.broadcast_to(is_valid[:, None, None], (*mask.shape[:3], count))
        return jnp.concatenate([is_valid, mask], axis=-1)

    def advance(self, states: Array, length: int) -> "RecurrentMemory":
        """Returns the memory for the next row.

        Args:
          states: `last_states` of all layers, `[layers, rows, memory, hidden]`.
          length: the length of the row.
        """
        filled = jnp.minimum(self.filled + length, self.states.shape[2])
        return RecurrentMemory(jnp.moveaxis(states, 0, 1).astype(self.states.dtype), filled)


def encode_with_memory(encode: Callable, batch: dict) -> Any:
    """Calls an encoder with the memory of the rows, and returns its result.

    Args:
      encode: (memory) -> a tuple with the next memory at its end.
      batch: the arrays of a batch: `carry`, the memory after the step before; `continues` `[rows]`; `segments`.

    Returns:
      The result of `encode`. The next memory has no hidden states for a row without tokens.
    """
    *states, memory = encode(batch["carry"].where(batch["continues"] > 0))
    return *states, memory.where(batch["segments"][:, 0] > 0)


def new_memory(rows: int, layers: int, length: int, hidden: int, dtype: str) -> RecurrentMemory:
    """Returns an empty memory for `length` hidden states of each layer."""
    return RecurrentMemory(jnp.zeros((rows, layers, length, hidden), dtype), jnp.zeros([rows], jnp.int32))


def last_states(memory: Array, states: Array) -> Array:
    """Returns the memory of a layer after a row, without a gradient.

    Args:
      memory: `[rows, memory, hidden]`.
      states: the hidden states of the row that the layer read, `[rows, length, hidden]`.

    Returns:
      The last hidden states of the two arrays, `[rows, memory, hidden]`.
    """
    return jax.lax.stop_gradient(jnp.concatenate([memory, states], axis=1)[:, -memory.shape[1] :])
