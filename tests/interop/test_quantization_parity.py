"""Small embeddings equal the small embeddings of sentence-transformers."""

import numpy as np
import pytest

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
            if precision == "int8" and hasattr(quantization, "_dequantize_embeddings"):
                restored = quantization._dequantize_embeddings(small, precision, quantizer.ranges)
                np.testing.assert_allclose(quantizer.restore(small), restored, atol=1e-5)
