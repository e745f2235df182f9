"""Retrieval by embeddings of 8 bits or 1 bit per dimension, as `semantic_search_usearch` of sentence-transformers."""

import numpy as np

from bertjax.config.limits import UBINARY
from bertjax.embedding.neighbors import Neighbours, nearest
from bertjax.inference.quantization import Quantizer

RESCORE = 4  # by default, this many times more documents are retrieved than returned
QUERIES_AT_ONCE = 64  # queries whose documents are rescored together


def nearest_small(
    queries: np.ndarray, documents: np.ndarray, quantizer: Quantizer, k: int, rescore: int = RESCORE
) -> Neighbours:
    """Returns the nearest small documents of float queries.

    Small queries retrieve `k * rescore` documents: by dot products of int8 numbers, or by the number of equal bits. The
    dot products of the float queries and the restored documents then select `k` of these documents.

    Args:
      queries: the embeddings of the queries, `[queries, width]` float32.
      documents: the small embeddings of the documents, `[documents, width or bytes]`.
      quantizer: the quantizer of the documents.
      k: the number of documents for each query. With fewer documents, all documents are returned.
      rescore: the factor, at least 1.
    """
    small_queries = _as_factors(quantizer(queries), quantizer)
    retrieved = nearest(small_queries, _as_factors(documents, quantizer), k * rescore, "dot").numbers
    k = min(k, retrieved.shape[1])
    neighbours = Neighbours(np.zeros((len(queries), k), np.int32), np.zeros((len(queries), k), np.float32))
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        rows = slice(start, start + QUERIES_AT_ONCE)
        scores = np.einsum("qw,qdw->qd", queries[rows], quantizer.restore(documents[retrieved[rows]]))
        places = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        neighbours.numbers[rows] = np.take_along_axis(retrieved[rows], places, 1)
        neighbours.cosines[rows] = np.take_along_axis(scores, places, 1)
    return neighbours


def _as_factors(small: np.ndarray, quantizer: Quantizer) -> np.ndarray:
    """Returns float32 vectors whose dot products compare small embeddings; bits become -1 and 1."""
    if quantizer.precision == UBINARY:
        return 2 * quantizer.restore(small) - 1
    return small.astype(np.float32)
