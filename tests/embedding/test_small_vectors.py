"""Retrieval by embeddings of 8 bits or 1 bit per dimension."""

import dataclasses

import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.data.loading.examples import Examples
from bertjax.embedding.datasets import EncodedTexts
from bertjax.embedding.evaluators import ScoredTexts, make_split, with_small_documents
from bertjax.embedding.retrieval import Search
from bertjax.embedding.small_vectors import nearest_small
from bertjax.finetuning.metrics import l2_normalize
from bertjax.inference.quantization import Quantizer

WIDTH = 20


@pytest.fixture
def vectors():
    rng = np.random.default_rng(0)
    return [l2_normalize(rng.normal(size=(rows, WIDTH))) for rows in (70, 300)]


@pytest.mark.parametrize("precision", ["int8", "ubinary"])
@pytest.mark.parametrize("rescore", [1, 4, 1000])
def test_float_queries_rank_the_documents_that_small_queries_retrieve(precision, rescore, vectors):
    queries, documents = vectors
    quantizer = Quantizer.calibrated(precision, documents)
    small = quantizer(documents)
    if precision == "int8":
        first = quantizer(queries).astype(int) @ small.astype(int).T
        steps = (documents.max(0) - documents.min(0)) / 255
        assert (np.abs(quantizer.restore(small) - documents) < 1.001 * steps).all()
    else:
        bits = [np.where(array > 0, 1, -1) for array in (queries, documents)]
        first = bits[0] @ bits[1].T
        np.testing.assert_array_equal(quantizer.restore(small), bits[1] > 0)
    expected = []
    for query, scores in zip(queries, first):
        retrieved = np.argsort(-scores, kind="stable")[: 10 * rescore]
        expected.append(retrieved[np.argsort(-(quantizer.restore(small[retrieved]) @ query), kind="stable")[:10]])
    neighbours = nearest_small(queries, small, quantizer, 10, rescore)
    np.testing.assert_array_equal(np.sort(neighbours.numbers), np.sort(expected))
    cosines = np.einsum("qw,qkw->qk", queries, quantizer.restore(small[neighbours.numbers]))
    np.testing.assert_allclose(neighbours.cosines, cosines, atol=1e-6)
    assert (np.diff(neighbours.cosines) <= 0).all()


def test_small_documents_are_evaluated_beside_float_documents(vectors):
    queries, documents = vectors
    relevant = [{int(number): 1.0} for number in (queries @ documents.T).argmax(1)]
    search = Search([""] * 70, [""] * 300, relevant)
    split = make_split(search, EncodedTexts(Examples([], []), np.arange(370)))
    embeddings = np.concatenate(vectors)
    scores = split.score(embeddings)
    assert scores["recall@1"] == 1 and len(scores) == 4
    for precision in ("int8", "ubinary"):
        small = with_small_documents(split, precision, 300).score(embeddings)
        assert {name: small[name] for name in scores} == scores and len(small) == 8
        assert 0.3 < small[f"recall@10_{precision}"] <= 1
    assert small["recall@10_ubinary"] < 1
    assert with_small_documents(split, None, None) is split


def test_settings_without_small_documents_are_refused(vectors):
    split = make_split(Search([""], [""], [{0: 1.0}]), EncodedTexts(Examples([], []), np.arange(2)))
    pairs = ScoredTexts(Examples([], []), np.zeros((1, 2)), scores=np.ones(1))
    for dataset, precision, rescore, message in (
        (split, None, 4, "^--rescore=4: is for small vectors; add --precision=int8 or --precision=ubinary$"),
        (split, "int4", None, "^precision = 'int4': choose one of float32, int8, ubinary$"),
        (split, "int8", 0, "^--rescore=0: must be at least 1$"),
        (pairs, "int8", None, "^--precision=int8: is for queries and documents, such as form=search; leave it out$"),
    ):
        with pytest.raises(UserError, match=message):
            with_small_documents(dataset, precision, rescore)
    assert dataclasses.replace(split, precision="int8").rescore == 4
