"""Exact nearest neighbours: the embeddings of documents that are most similar to the embeddings of queries."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.common.progress import Bar
from bertjax.finetuning.metrics import comparable

QUERIES, DOCUMENTS = 1024, 16_384  # The size of a block; the cosines of one block are in memory.
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

    The search runs on one device of this host. Apart from the embeddings and the results, the memory does not grow with
    the number of queries and documents.

    Args:
      queries: the embeddings of the queries, `[queries, width]`.
      documents: the embeddings of the documents, `[documents, width]`.
      k: the number of documents for each query. With fewer documents, all documents are returned.
      similarity: cosine or dot, see `metrics.comparable`.
      bar: counts the compared pairs of a query and a document.
    """
    device = jax.local_devices()[0]
    k = min(k, len(documents))
    neighbours = Neighbours(np.zeros((len(queries), k), np.int32), np.zeros((len(queries), k), np.float32))
    for rows in _blocks(len(queries), QUERIES):
        query_block = jax.device_put(_padded(comparable(queries[rows], similarity), QUERIES, FEW), device)
        numbers, cosines = (
            jax.device_put(np.full((len(query_block), k), value, dtype), device)
            for value, dtype in ((0, np.int32), (-np.inf, np.float32))
        )
        for columns in _blocks(len(documents), DOCUMENTS):
            block = jax.device_put(_padded(comparable(documents[columns], similarity), DOCUMENTS), device)
            numbers, cosines = _merged(numbers, cosines, query_block, block, columns.start, len(documents))
            if bar:
                jax.block_until_ready(cosines)
                bar.update(len(queries[rows]) * len(documents[columns]))
        neighbours.numbers[rows] = np.asarray(numbers)[: len(queries[rows])]
        neighbours.cosines[rows] = np.asarray(cosines)[: len(queries[rows])]
    return neighbours


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
    block_numbers = first + jnp.arange(len(documents), dtype=jnp.int32)
    block_cosines = jnp.matmul(queries, documents.T, precision="highest")
    block_cosines = jnp.where(block_numbers < count, block_cosines, -jnp.inf)
    # Among equal cosines `top_k` returns the first: the earlier neighbours have lower numbers.
    best, places = jax.lax.top_k(jnp.concatenate([cosines, block_cosines], 1), cosines.shape[1])
    numbers = jnp.concatenate([numbers, jnp.broadcast_to(block_numbers, block_cosines.shape)], 1)
    return jnp.take_along_axis(numbers, places, 1), best


def _blocks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _padded(vectors: np.ndarray, most: int, least: int = ROUND) -> np.ndarray:
    """Returns vectors `[n, width]` with zeros up to a multiple of `ROUND` rows, or to a power of two from `least`."""
    step = min(ROUND, max(least, 1 << (len(vectors) - 1).bit_length()))
    rows = min(most, -(-len(vectors) // step) * step)
    return np.pad(vectors, ((0, rows - len(vectors)), (0, 0)))
