"""Evaluation of embeddings compared with the evaluators of sentence-transformers, with many tied cosines."""

import types

import numpy as np
import pytest

from bertjax.data.loading.examples import Examples
from bertjax.embedding.datasets import EncodedTexts
from bertjax.embedding.evaluators import make_split
from bertjax.embedding.forms import TextSet
from bertjax.embedding.retrieval import Search

evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.extra_packages


class Stub:
    """A model of sentence-transformers whose vector of the text "7" is row 7 of an array."""

    model_card_data = types.SimpleNamespace(set_evaluation_metrics=lambda *_: None)

    def __init__(self, vectors, similarity_fn_name="cosine"):
        self.vectors, self.similarity_fn_name = vectors, similarity_fn_name

    def encode(self, texts, convert_to_tensor=False, truncate_dim=None, **_):
        rows = self.vectors[[int(text) for text in texts], :truncate_dim]
        return torch.tensor(rows) if convert_to_tensor else rows

    encode_query = encode_document = encode

    def similarity(self, queries, documents):
        from sentence_transformers.util import cos_sim, dot_score

        return (cos_sim if self.similarity_fn_name == "cosine" else dot_score)(queries, documents)


def made(count: int, has_ties: bool, width: int = 16) -> np.ndarray:
    rng = np.random.default_rng(count)
    if has_ties:  # the norms are 4 or 2: all cosines are exact
        return rng.choice([-1, 1], (count, width)).astype(np.float32)
    return rng.normal(size=(count, width)).astype(np.float32)


def ours(data, numbers, vectors, widths=(), similarity="cosine"):
    split = make_split(data, EncodedTexts(Examples([], []), numbers), widths, similarity=similarity)
    return split.score(vectors), split.decide(vectors), split.metric


def assert_same(scores, evaluator, inputs, vectors, names, tolerance=1e-9, similarity="cosine"):
    """Compares scores, and also scores of the first four dimensions if `names` have the suffix."""
    for name, their_name in names.items():
        width = 4 if name.endswith("_4") else None
        expected = evaluator(*inputs, truncate_dim=width)(Stub(vectors, similarity))
        assert scores[name] == pytest.approx(expected[f"{similarity}_{their_name}"], abs=tolerance), name


def sides(pairs):
    return [[str(i) for i in side] for side in pairs.T]


@pytest.mark.parametrize("has_ties", [False, True])
def test_scores_of_scored_pairs_equal_sentence_transformers(has_ties):
    vectors, rng = made(80, has_ties), np.random.default_rng(0)
    pairs, values = rng.integers(80, size=(120, 2)), rng.integers(0, 11, 120) / 2
    scores, decided, metric = ours(TextSet(pairs, values.astype(np.float32)), pairs, vectors, widths=(4,))
    assert not decided and metric == "spearman" and scores.keys() == {"spearman", "pearson", "spearman_4"}
    inputs, evaluator = (*sides(pairs), values.tolist()), evaluation.EmbeddingSimilarityEvaluator
    for width, name in ((None, "spearman"), (None, "pearson"), (4, "spearman_4")):
        expected = evaluator(*inputs, truncate_dim=width)(Stub(vectors))
        assert scores[name] == pytest.approx(expected[f"{name.removesuffix('_4')}_cosine"], abs=1e-6)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("positive", [0.1, 0.5, 0.95])
def test_scores_of_labelled_pairs_equal_sentence_transformers(positive, has_ties):
    vectors, rng = made(80, has_ties), np.random.default_rng(int(100 * positive))
    pairs, labels = rng.integers(80, size=(120, 2)), (rng.random(120) < positive).astype(np.int32)
    scores, decided, metric = ours(TextSet(pairs, labels), pairs, vectors, widths=(4,))
    assert metric == "average_precision"
    inputs, evaluator = (*sides(pairs), labels.tolist()), evaluation.BinaryClassificationEvaluator
    names = {"average_precision": "ap", "average_precision_4": "ap", "accuracy": "accuracy", "f1": "f1"}
    assert_same(scores, evaluator, inputs, vectors, names)
    names = {f"{name}_threshold": f"{name}_threshold" for name in ("accuracy", "f1")}
    assert_same(decided, evaluator, inputs, vectors, names, tolerance=1e-6)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("documents", [7, 300])  # fewer queries than the evaluated ranks, and more
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_retrieval_scores_equal_sentence_transformers(similarity, documents, has_ties):
    queries, rng = 50, np.random.default_rng(documents)
    vectors = made(queries + documents, has_ties)
    relevant = [dict.fromkeys(rng.choice(documents, rng.integers(1, 4), replace=False), 1.0) for _ in range(queries)]
    search = Search(range(queries), range(documents), relevant)
    scores, decided, metric = ours(search, np.arange(queries + documents), vectors, (4,), similarity)
    assert not decided and metric == "ndcg@10"
    # sentence-transformers sorts documents with equal scores by their ids; zero-padded ids keep the order of the
    # numbers.
    name = "{:04}".format
    inputs = (
        {str(i): str(i) for i in range(queries)},
        {name(i): str(queries + i) for i in range(documents)},
        {str(i): {name(document) for document in documents_of_query} for i, documents_of_query in enumerate(relevant)},
    )
    names = {
        metric_name: metric_name.removesuffix("_4")
        for metric_name in ("ndcg@10", "ndcg@10_4", "mrr@10", "recall@1", "recall@10")
    }
    assert_same(scores, evaluation.InformationRetrievalEvaluator, inputs, vectors, names, similarity=similarity)


def test_ndcg_of_graded_relevance_equals_scikit_learn():
    sklearn = pytest.importorskip("sklearn.metrics")
    vectors, rng = made(60, has_ties=False), np.random.default_rng(1)
    grades = rng.integers(0, 4, (20, 40))
    relevant = [{i: float(grade) for i, grade in enumerate(row) if grade} for row in grades]
    scores, *_ = ours(Search(range(20), range(40), relevant), np.arange(60), vectors)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert scores["ndcg@10"] == pytest.approx(sklearn.ndcg_score(grades, units[:20] @ units[20:].T, k=10), abs=1e-6)
