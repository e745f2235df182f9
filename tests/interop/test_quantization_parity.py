"""Small embeddings, and retrieval with them, equal sentence-transformers."""

import numpy as np
import pytest

from bertjax.embedding.small_vectors import nearest_small
from bertjax.inference.quantization import Quantizer, ranges_of

pytestmark = pytest.mark.extra_packages


@pytest.mark.parametrize("width", [7, 32])
def test_small_embeddings_equal_quantize_embeddings(width):
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    rng = np.random.default_rng(0)
    embeddings, calibration = (rng.normal(size=(rows, width)).astype(np.float32) for rows in (300, 150))
    embeddings[:, 3] = calibration[:, 3] = 0.25  # a dimension without a range
    for precision, calibrations in (("int8", (None, calibration)), ("ubinary", (None,))):
        for used in calibrations:
            quantizer = Quantizer.calibrated(precision, embeddings, None if used is None else ranges_of(used))
            expected = quantization.quantize_embeddings(embeddings, precision, calibration_embeddings=used)
            small = quantizer(embeddings)
            assert small.dtype == expected.dtype
            np.testing.assert_array_equal(small, expected)
            other, offset = ("uint8", 128) if precision == "int8" else ("binary", -128)
            shifted = quantization.quantize_embeddings(embeddings, other, calibration_embeddings=used)
            np.testing.assert_array_equal(small.astype(int) + offset, shifted)
            if precision == "int8" and hasattr(quantization, "_dequantize_embeddings"):
                restored = quantization._dequantize_embeddings(small, precision, quantizer.ranges)
                np.testing.assert_allclose(quantizer.restore(small), restored, atol=1e-5)


@pytest.mark.parametrize("package, precision", [("usearch", "int8"), ("usearch", "ubinary"), ("faiss", "ubinary")])
@pytest.mark.parametrize("rescore", [1, 2, 4, 1000])
def test_retrieval_of_small_documents_equals_sentence_transformers(rescore, package, precision):
    pytest.importorskip(package)
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    search = getattr(quantization, f"semantic_search_{package}")
    rng, k = np.random.default_rng(0), 10
    queries, documents = (rng.normal(size=(rows, 60)).astype(np.float32) for rows in (50, 300))
    quantizer = Quantizer.calibrated(precision, documents)
    small = quantizer(documents)
    theirs, _ = search(
        queries, small, corpus_precision=precision, top_k=k, ranges=quantizer.ranges, rescore_multiplier=rescore
    )
    ours = nearest_small(queries, small, quantizer, k, rescore)
    # Documents with equal first scores have no defined order. A query is compared if the last retrieved document has a
    # higher first score than the next document.
    first_scores = -np.sort(-_first_scores(quantizer(queries), small, precision), axis=1)
    count = min(k * rescore, len(documents))
    is_compared = np.ones(len(queries), bool)
    if count < len(documents):
        is_compared = first_scores[:, count - 1] > first_scores[:, count]
    assert is_compared.sum() >= 5
    for query in np.flatnonzero(is_compared):
        assert ours.numbers[query].tolist() == [hit["corpus_id"] for hit in theirs[query]]
        np.testing.assert_allclose(ours.cosines[query], [hit["score"] for hit in theirs[query]], atol=1e-4)


def _first_scores(queries, documents, precision):
    """Returns the scores by which small queries retrieve documents, `[queries, documents]`."""
    if precision == "ubinary":
        queries, documents = (np.where(np.unpackbits(array, axis=1), 1, -1) for array in (queries, documents))
    return queries.astype(int) @ documents.astype(int).T
