"""How vectors are judged beside sentence-transformers' evaluators: the same vectors, also with many equal cosines."""

import types

import numpy as np
import pytest

from bertjax.data.batches.examples import Examples
from bertjax.tasks.judges import judged
from bertjax.tasks.searches import Search
from bertjax.tasks.text_sets import EncodedTexts, TextSet

evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
torch = pytest.importorskip("torch")


class Stub:
    """A model of sentence-transformers whose vector of the text "7" is row 7 of an array."""

    similarity_fn_name = "cosine"
    model_card_data = types.SimpleNamespace(set_evaluation_metrics=lambda *_: None)

    def __init__(self, vectors):
        self.vectors = vectors

    def encode(self, texts, convert_to_tensor=False, truncate_dim=None, **_):
        found = self.vectors[[int(text) for text in texts], :truncate_dim]
        return torch.tensor(found) if convert_to_tensor else found

    encode_query = encode_document = encode

    def similarity(self, queries, documents):
        from sentence_transformers.util import cos_sim

        return cos_sim(queries, documents)


def made(count: int, has_ties: bool, width: int = 16) -> np.ndarray:
    rng = np.random.default_rng(count)
    if has_ties:  # the lengths are 4, or 2: all cosines are exact
        return rng.choice([-1, 1], (count, width)).astype(np.float32)
    return rng.normal(size=(count, width)).astype(np.float32)


def ours(found, numbers, vectors, widths=()):
    split, metric = judged(found, EncodedTexts(Examples([], []), numbers, 0), widths)
    return split.score(list(vectors)), split.decide(list(vectors)), metric


@pytest.mark.parametrize("has_ties", [False, True])
def test_scored_pairs(has_ties):
    vectors, rng = made(80, has_ties), np.random.default_rng(0)
    pairs, values = rng.integers(80, size=(120, 2)), rng.integers(0, 11, 120) / 2
    scores, decided, metric = ours(TextSet(pairs, values.astype(np.float32)), pairs, vectors, widths=(4,))
    assert not decided and metric == "spearman" and scores.keys() == {"spearman", "pearson", "spearman_4"}
    sides = [[str(i) for i in side] for side in pairs.T]
    for width, suffix in ((None, ""), (4, "_4")):
        theirs = evaluation.EmbeddingSimilarityEvaluator(*sides, values.tolist(), truncate_dim=width)(Stub(vectors))
        assert scores[f"spearman{suffix}"] == pytest.approx(theirs["spearman_cosine"], abs=1e-6)
    theirs = evaluation.EmbeddingSimilarityEvaluator(*sides, values.tolist())(Stub(vectors))
    assert scores["pearson"] == pytest.approx(theirs["pearson_cosine"], abs=1e-6)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("positive", [0.1, 0.5, 0.95])
def test_labelled_pairs(positive, has_ties):
    vectors, rng = made(80, has_ties), np.random.default_rng(int(100 * positive))
    pairs, labels = rng.integers(80, size=(120, 2)), (rng.random(120) < positive).astype(np.int32)
    scores, decided, metric = ours(TextSet(pairs, labels), pairs, vectors, widths=(4,))
    assert metric == "average_precision"
    sides = [[str(i) for i in side] for side in pairs.T]
    theirs = evaluation.BinaryClassificationEvaluator(*sides, labels.tolist())(Stub(vectors))
    assert scores["average_precision"] == pytest.approx(theirs["cosine_ap"], abs=1e-9)
    for name in ("accuracy", "f1"):
        assert scores[name] == pytest.approx(theirs[f"cosine_{name}"], abs=1e-9)
        assert decided[f"{name}_threshold"] == pytest.approx(theirs[f"cosine_{name}_threshold"], abs=1e-6)
    theirs = evaluation.BinaryClassificationEvaluator(*sides, labels.tolist(), truncate_dim=4)(Stub(vectors))
    assert scores["average_precision_4"] == pytest.approx(theirs["cosine_ap"], abs=1e-9)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("documents", [7, 300])  # fewer than the ranks that are looked at, and more
def test_retrieval(documents, has_ties):
    queries, rng = 50, np.random.default_rng(documents)
    vectors = made(queries + documents, has_ties)
    relevant = [dict.fromkeys(rng.choice(documents, rng.integers(1, 4), replace=False), 1.0) for _ in range(queries)]
    search = Search(range(queries), range(documents), relevant)
    scores, decided, metric = ours(search, np.arange(queries + documents), vectors, widths=(4,))
    assert not decided and metric == "ndcg@10"
    name = "{:04}".format  # so that their order of ids, by which they sort what is equal, is that of the numbers
    given = (
        {str(i): str(i) for i in range(queries)},
        {name(i): str(queries + i) for i in range(documents)},
        {str(i): {name(document) for document in found} for i, found in enumerate(relevant)},
    )
    theirs = evaluation.InformationRetrievalEvaluator(*given)(Stub(vectors))
    for each in ("ndcg@10", "mrr@10", "recall@1", "recall@10"):
        assert scores[each] == pytest.approx(theirs[f"cosine_{each}"], abs=1e-9), each
    theirs = evaluation.InformationRetrievalEvaluator(*given, truncate_dim=4)(Stub(vectors))
    assert scores["ndcg@10_4"] == pytest.approx(theirs["cosine_ndcg@10"], abs=1e-9)


def test_documents_that_are_more_or_less_relevant():
    sklearn = pytest.importorskip("sklearn.metrics")
    vectors, rng = made(60, has_ties=False), np.random.default_rng(1)
    grades = rng.integers(0, 4, (20, 40))
    relevant = [{i: float(grade) for i, grade in enumerate(row) if grade} for row in grades]
    scores, *_ = ours(Search(range(20), range(40), relevant), np.arange(60), vectors)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert scores["ndcg@10"] == pytest.approx(sklearn.ndcg_score(grades, units[:20] @ units[20:].T, k=10), abs=1e-6)
