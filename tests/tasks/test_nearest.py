"""Exact nearest neighbours in blocks."""

import numpy as np
import pytest

from bertjax.tasks import nearest as module
from bertjax.tasks.metrics import unit
from bertjax.tasks.nearest import nearest


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for name, size in (("QUERIES", 128), ("DOCUMENTS", 192), ("ROUND", 64)):
        monkeypatch.setattr(module, name, size)


@pytest.mark.parametrize("k", [1, 20, 1000])  # fewer than a block has, and more than there are
def test_what_is_found_is_what_comparing_all_finds_with_equal_ones_in_their_order(k):
    rng = np.random.default_rng(0)
    # Cosines are multiples of 1/8, and exact: hundreds are equal.
    queries, documents = (rng.choice([-1.0, 1.0], (count, 16)) for count in (301, 517))
    cosines = queries @ documents.T / 16
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    found = nearest(queries, documents, k)
    assert (found.numbers == order).all()
    np.testing.assert_array_equal(found.cosines, np.take_along_axis(cosines, order, 1))


def test_a_document_and_its_copies_have_the_same_cosine_wherever_they_are():
    rng = np.random.default_rng(1)
    which = rng.integers(100, size=700)
    documents, queries = rng.normal(size=(100, 50))[which], rng.normal(size=(70, 50))
    numbers, cosines = nearest(queries, documents, len(documents))
    for row, values in zip(numbers, cosines):
        by_number = np.empty_like(values)
        by_number[row] = values
        first = by_number[[np.flatnonzero(which == each)[0] for each in which]]
        assert (by_number == first).all() and (np.diff(row)[np.diff(values) == 0] > 0).all()
    np.testing.assert_allclose(cosines[:, 0], (unit(queries) @ unit(documents).T).max(1), rtol=1e-5)
