"""Exact nearest neighbours: the vectors of documents that are most like those of queries."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.common.progress import Bar
from bertjax.finetuning.metrics import comparable

QUERIES, DOCUMENTS = 1024, 16_384  # a block has so many, and only its cosines are in memory
ROUND = 256  # smaller blocks are padded to a multiple: few shapes are compiled, and equal documents get equal cosines
FEW = 8  # blocks of fewer than `ROUND` queries are padded to a power of two, and to at least this number of rows


class Neighbours(NamedTuple):
    """The nearest documents of each query, the nearest one first, and of equal ones that with the lowest number.

    Attributes:
      numbers: `[queries, k]` int32: which documents they are.
      cosines: `[queries, k]` float32; dot products, if vectors are compared by these.
    """

    numbers: np.ndarray
    cosines: np.ndarray


def nearest(queries, documents, k: int, similarity: str = "cosine", bar: Bar | None = None) -> Neighbours:
    """Finds the `k` nearest documents `[documents, width]` for each query `[queries, width]`.

    `similarity`: cosine or dot, see `metrics.comparable`.

    With fewer than `k` documents, all documents are returned. The search runs on one device of this host. Apart from
    the vectors and the results, its memory does not grow with the number of queries and documents. `bar` counts the
    pairs of a query and a document that are compared.
    """
    device = jax.local_devices()[0]
    k = min(k, len(documents))
    found = Neighbours(np.zeros((len(queries), k), np.int32), np.zeros((len(queries), k), np.float32))
    for rows in _blocks(len(queries), QUERIES):
        asked = jax.device_put(_padded(comparable(queries[rows], similarity), QUERIES, FEW), device)
        best = jax.device_put(_none(len(asked), k), device)
        for columns in _blocks(len(documents), DOCUMENTS):
            some = jax.device_put(_padded(comparable(documents[columns], similarity), DOCUMENTS), device)
            best = _merged(best, asked, some, columns.start, len(documents))
            if bar:
                jax.block_until_ready(best)
                bar.update(len(queries[rows]) * len(documents[columns]))
        for name, values in best._asdict().items():
            getattr(found, name)[rows] = np.asarray(values)[: len(queries[rows])]
    return found


def _none(rows: int, k: int) -> Neighbours:
    return Neighbours(np.zeros((rows, k), np.int32), np.full((rows, k), -np.inf, np.float32))


@functools.partial(jax.jit, donate_argnums=0)
def _merged(best: Neighbours, queries, documents, first, count) -> Neighbours:
    """Returns the best of those found before and of a block of documents, of which number `first` is the first one."""
    numbers = first + jnp.arange(len(documents), dtype=jnp.int32)
    cosines = jnp.matmul(queries, documents.T, precision="highest")
    cosines = jnp.where(numbers < count, cosines, -jnp.inf)
    # Of equal ones `top_k` takes the first: those found before have lower numbers.
    found, places = jax.lax.top_k(jnp.concatenate([best.cosines, cosines], 1), best.cosines.shape[1])
    numbers = jnp.concatenate([best.numbers, jnp.broadcast_to(numbers, cosines.shape)], 1)
    return Neighbours(jnp.take_along_axis(numbers, places, 1), found)


def _blocks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _padded(vectors: np.ndarray, most: int, least: int = ROUND) -> np.ndarray:
    """Returns vectors `[n, width]` with zeros up to a multiple of `ROUND` rows, or to a power of two from `least`."""
    step = min(ROUND, max(least, 1 << (len(vectors) - 1).bit_length()))
    rows = min(most, -(-len(vectors) // step) * step)
    return np.pad(vectors, ((0, rows - len(vectors)), (0, 0)))
