"""Exact nearest neighbours: the embeddings of documents that are most similar to the embeddings of queries."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.common.progress import Bar
from bertjax.finetuning.metrics import comparable

QUERIES, DOCUMENTS = 1024, 32_768  # The size of a block; the cosines of one block are in memory.
# Smaller blocks are padded to a multiple, so that few shapes are compiled, and equal documents have equal cosines.
ROUND = 256
FEW = 8  # Blocks of fewer than `ROUND` queries are padded to a power of two, and to at least this number of rows.


class Neighbours(NamedTuple):
    """The nearest documents of each query, the highest cosine first. Equal cosines are in the order of the documents.

    Attributes:
      numbers: the numbers of the documents, `[queries, k]` int32.
      cosines: the cosines, or the dot products, `[queries, k]` float32.
    """

    numbers: np.ndarray
    cosines: np.ndarray


def nearest(
    queries: np.ndarray, documents: np.ndarray, k: int, similarity: str = "cosine", bar: Bar | None = None
) -> Neighbours:
    """Returns the nearest documents of each query.

    The search runs on all devices of this host. Apart from the embeddings and the results, the memory does not grow
    with the number of queries and documents.

    Args:
      queries: the embeddings of the queries, `[queries, width]`; the array may be mapped into memory.
      documents: the embeddings of the documents, `[documents, width]`; the array may be mapped into memory.
      k: the number of documents for each query. With fewer documents, all documents are returned.
      similarity: cosine or dot, see `metrics.comparable`.
      bar: counts the compared pairs of a query and a document.
    """
    shape = len(queries), min(k, len(documents))
    neighbours = Neighbours(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
    for rows in query_blocks(len(queries)):
        block = nearest_of_block(queries[rows], documents, k, similarity, bar)
        neighbours.numbers[rows], neighbours.cosines[rows] = block
    return neighbours


def query_blocks(count: int) -> list[slice]:
    """Returns the blocks of `count` queries whose neighbours `nearest_of_block` computes together."""
    return _blocks(count, QUERIES)


def nearest_of_block(
    queries: np.ndarray, documents: np.ndarray, k: int, similarity: str = "cosine", bar: Bar | None = None
) -> Neighbours:
    """Returns the nearest documents of at most `QUERIES` queries, see `nearest`.

    A device compares the queries with every n-th block of documents, where n is the number of devices of this host.
    """
    k, columns = min(k, len(documents)), _blocks(len(documents), DOCUMENTS)
    devices = jax.local_devices()[: len(columns)]
    padded = _padded(comparable(queries, similarity), QUERIES, FEW)
    empty = np.zeros((len(padded), k), np.int32), np.full((len(padded), k), -np.inf, np.float32)
    query_blocks_by_device = [jax.device_put(padded, device) for device in devices]
    states = [jax.device_put(empty, device) for device in devices]
    for turn, block_columns in enumerate(columns):
        place = turn % len(devices)
        block = _padded(comparable(documents[block_columns], similarity), DOCUMENTS)
        jax.block_until_ready(states[place])  # A device has one block in work, so that the blocks stay few.
        block = jax.device_put(block, devices[place])
        states[place] = _merged(
            *states[place], query_blocks_by_device[place], block, block_columns.start, len(documents)
        )
        if bar:
            bar.update(len(queries) * len(documents[block_columns]))
    state = states[0] if len(states) == 1 else _combined(jax.device_put(states, devices[0]))
    numbers, cosines = map(np.asarray, state)
    return Neighbours(numbers[: len(queries)], cosines[: len(queries)])


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _merged(
    numbers: jax.Array, cosines: jax.Array, queries: jax.Array, documents: jax.Array, first: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the nearest documents among the earlier neighbours and a block of documents.

    Args:
      numbers: the numbers of the earlier neighbours, `[queries, k]`.
      cosines: the cosines of the earlier neighbours, `[queries, k]`.
      queries: the embeddings of queries.
      documents: the embeddings of the block.
      first: the number of the first document of the block.
      count: the number of all documents; the rest of the block is padding.

    Returns:
      The new `numbers` and `cosines`.
    """
    block_cosines = jnp.matmul(queries, documents.T, precision="highest")
    block_cosines = jnp.where(first + jnp.arange(len(documents)) < count, block_cosines, -jnp.inf)
    # Among equal cosines `top_k` returns the first: the earlier neighbours have lower numbers.
    k = cosines.shape[1]
    best_of_block, places = jax.lax.top_k(block_cosines, min(k, len(documents)))
    best, merged_places = jax.lax.top_k(jnp.concatenate([cosines, best_of_block], 1), k)
    numbers = jnp.concatenate([numbers, first + places], 1)
    return jnp.take_along_axis(numbers, merged_places, 1), best


@jax.jit
def _combined(states: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Returns the nearest documents among the neighbours of all devices, by falling cosines and then by number."""
    numbers, cosines = (jnp.concatenate(arrays, 1) for arrays in zip(*states))
    negative, numbers = jax.lax.sort((-cosines, numbers), num_keys=2)
    k = states[0][0].shape[1]
    return numbers[:, :k], -negative[:, :k]


def _blocks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _padded(vectors: np.ndarray, most: int, least: int = ROUND) -> np.ndarray:
    """Returns vectors `[n, width]` with zeros up to a multiple of `ROUND` rows, or to a power of two from `least`."""
    step = min(ROUND, max(least, 1 << (len(vectors) - 1).bit_length()))
    rows = min(most, -(-len(vectors) // step) * step)
    return np.pad(vectors, ((0, rows - len(vectors)), (0, 0)))
