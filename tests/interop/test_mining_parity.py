"""Hard negatives equal the negatives of `mine_hard_negatives` of sentence-transformers, from the same embeddings."""

import json

import numpy as np
import pytest

from bertjax.embedding import mining, retrieval
from bertjax.embedding.forms import FORMS
from bertjax.embedding.hard_negatives import make_choice
from bertjax.finetuning.metrics import l2_normalize
from bertjax.reranking import forms as list_forms

torch = pytest.importorskip("torch")
datasets = pytest.importorskip("datasets")
st_util = pytest.importorskip("sentence_transformers.util")
pytestmark = pytest.mark.extra_packages

QUERIES, DOCUMENTS, NEGATIVES, WIDTH = 12, 40, 3, 8
EVERY = DOCUMENTS  # a number of ranks that includes all documents
ANCHOR, POSITIVE = "query", "answer"


class Embedder:
    """A model of sentence-transformers that returns prepared vectors, and a CrossEncoder with prepared scores."""

    device = torch.device("cpu")
    similarity = staticmethod(st_util.cos_sim)
    similarity_pairwise = staticmethod(st_util.pairwise_cos_sim)

    def __init__(self, vectors, scores):
        self._vectors, self._scores = vectors, scores

    def encode_query(self, texts, normalize_embeddings=False, **_):
        vectors = np.stack([self._vectors[text] for text in texts])
        return l2_normalize(vectors) if normalize_embeddings else vectors

    encode_document = encode_query

    def predict(self, pairs, **_):
        return torch.from_numpy(self.scores(pairs))

    def scores(self, pairs):
        return np.array([self._scores[pair] for pair in pairs], np.float32)

    def identity(self):
        return "scores"


@pytest.fixture
def texts():
    """Returns pairs of a query and one of its two positives, and more documents."""
    pairs = [(f"query {i}", f"document {2 * i + j}") for i in range(QUERIES) for j in range(2)]
    return pairs, [f"document {i}" for i in range(2 * QUERIES, DOCUMENTS)]


@pytest.fixture
def model(texts):
    """Returns a model whose positives are near their queries, but not always nearer than other documents."""
    rng = np.random.default_rng(0)
    vectors = dict(zip((f"document {i}" for i in range(DOCUMENTS)), rng.normal(size=(DOCUMENTS, WIDTH))))
    for i in range(QUERIES):
        near = vectors[f"document {2 * i}"] + vectors[f"document {2 * i + 1}"] + rng.normal(size=WIDTH) / 2
        vectors[f"query {i}"] = near
    vectors = {text: vector.astype(np.float32) for text, vector in vectors.items()}
    pairs = [(f"query {i}", f"document {j}") for i in range(QUERIES) for j in range(DOCUMENTS)]
    scores = dict(zip(pairs, rng.permutation(len(pairs)) / len(pairs)))
    scores |= {pair: 0.5 + scores[pair] / 2 for pair in texts[0]}
    return Embedder(vectors, scores)


def mine_theirs(texts, model, output_format="n-tuple", **options):
    pairs, corpus = texts
    queries, positives = map(list, zip(*pairs))
    dataset = datasets.Dataset.from_dict({ANCHOR: queries, POSITIVE: positives})
    return st_util.mine_hard_negatives(
        dataset, model, corpus=corpus, num_negatives=NEGATIVES, output_format=output_format, verbose=False, **options
    )


def write_ours(texts, model, path, reranker=None, negatives=NEGATIVES, **flags):
    pairs, corpus = texts
    search = retrieval.without_duplicates(retrieval.of_texts(pairs))
    search = search._replace(documents=[*search.documents, *corpus])
    defaults = dict(first=1, last=EVERY, margin="-inf", min_score=-np.inf, max_score=np.inf, seed=None)
    choice = make_choice(negatives, **(defaults | flags))
    queries, documents = model.encode_query(search.queries), model.encode_document(search.documents)
    mined = mining.mine_negatives(search, queries, documents, choice, reranker=reranker)
    list(mining.write_negatives(path, search, mined, choice, with_scores=True))


def mine_ours(texts, model, path, *arguments, **flags):
    """Returns the rows of our table (query, positive, negatives ..., scores of all documents ...)."""
    write_ours(texts, model, path, *arguments, **flags)
    return [list(json.loads(line).values()) for line in path.read_text().splitlines()]


def assert_same_rows(ours, theirs):
    their_rows = [[*list(row.values())[:-1], *row["scores"]] for row in theirs]
    assert 0 < len(their_rows)
    count = 2 + NEGATIVES
    assert [row[:count] for row in ours] == [row[:count] for row in their_rows]
    np.testing.assert_allclose([row[count:] for row in ours], [row[count:] for row in their_rows], atol=1e-5)


RANGES = [
    (dict(range_max=EVERY), {}),
    (dict(range_min=4, range_max=9), dict(first=5, last=9)),
]
LIMITS = [
    (dict(max_score=0.3), dict(max_score=0.3)),
    (dict(max_score=0.5, min_score=0.1), dict(max_score=0.5, min_score=0.1)),
    (dict(absolute_margin=0.0), dict(margin=0)),
    (dict(absolute_margin=0.2), dict(margin=0.2)),
    (dict(relative_margin=0.3), dict(margin="30%")),
]


@pytest.mark.parametrize("options, flags", [*RANGES, *LIMITS])
def test_negatives_and_cosines_equal(options, flags, texts, model, tmp_path):
    theirs = mine_theirs(texts, model, output_scores=True, **dict(range_max=EVERY) | options)
    assert_same_rows(mine_ours(texts, model, tmp_path / "mined.jsonl", **flags), theirs)


@pytest.mark.parametrize("options, flags", LIMITS)
def test_negatives_and_scores_of_a_cross_encoder_equal(options, flags, texts, model, tmp_path):
    theirs = mine_theirs(texts, model, output_scores=True, cross_encoder=model, range_max=EVERY, **options)
    assert_same_rows(mine_ours(texts, model, tmp_path / "mined.jsonl", reranker=model, **flags), theirs)


@pytest.mark.parametrize("options, flags", LIMITS)
@pytest.mark.parametrize("is_reranked", [False, True])
def test_range_min_skips_documents_after_the_limits(is_reranked, options, flags, texts, model, tmp_path):
    """The table in docs/embeddings.md has this difference: `--first` counts ranks before the limits."""
    scorer, path = model if is_reranked else None, tmp_path / "mined.jsonl"
    theirs = mine_theirs(texts, model, range_min=2, range_max=EVERY, cross_encoder=scorer, **options)
    ours = mine_ours(texts, model, path, scorer, negatives=2 + NEGATIVES, **flags)
    assert [row[:2] + row[4 : 4 + NEGATIVES] for row in ours] == [list(row.values()) for row in theirs]
    ours = mine_ours(texts, model, path, scorer, first=3, **flags)
    assert [row[: 2 + NEGATIVES] for row in ours] != [list(row.values()) for row in theirs]


def test_only_our_negatives_exclude_the_text_of_the_query(texts, model, tmp_path):
    pairs, corpus = texts
    with_query = pairs, [*corpus, "query 0"]
    theirs = mine_theirs(with_query, model, range_max=EVERY)
    ours = mine_ours(with_query, model, tmp_path / "mined.jsonl")
    assert theirs[0]["negative_1"] == "query 0"
    assert "query 0" not in ours[0][1:] and ours == mine_ours(texts, model, tmp_path / "mined.jsonl")


@pytest.mark.parametrize("output_format, suffix", [
    ("triplet", "jsonl"), ("triplet", "csv"), ("n-tuple", "jsonl"), ("n-tuple", "csv"), ("labeled-pair", "jsonl"),
    ("labeled-pair", "csv"), ("labeled-list", "jsonl"),
])  # fmt: skip
def test_embed_and_rerank_read_their_tables(output_format, suffix, texts, model, tmp_path):
    theirs = mine_theirs(texts, model, output_format, range_max=EVERY, max_score=0.3)
    path = tmp_path / f"theirs.{suffix}"
    (theirs.to_csv if suffix == "csv" else theirs.to_json)(path)
    rows = [tuple(row.values()) for row in theirs]
    if output_format in ("triplet", "n-tuple"):
        assert list(FORMS["pairs"].read(path, theirs.column_names, "label").texts) == rows
        lists = list_forms.FORMS["pairs"].read(path, theirs.column_names, "", "").lists
        assert [(ranking.query, *ranking.documents) for ranking in lists] == rows
        assert all(ranking.grades == (1.0, *[0.0] * (len(row) - 2)) for ranking, row in zip(lists, rows))
    elif output_format == "labeled-pair":
        read = FORMS["labelled"].read(path, [ANCHOR, POSITIVE], "label")
        assert [(*pair, label) for pair, label in zip(read.texts, read.values)] == rows
        lists = list_forms.FORMS["labelled"].read(path, [ANCHOR, POSITIVE], "label", "").lists
        assert [
            (ranking.query, document, grade)
            for ranking in lists
            for document, grade in zip(ranking.documents, ranking.grades)
        ] == rows
    else:
        lists = list_forms.FORMS["lists"].read(path, [ANCHOR, POSITIVE], "labels", "").lists
        assert [(ranking.query, list(ranking.documents), list(ranking.grades)) for ranking in lists] == rows


def test_embed_and_rerank_read_their_scores(texts, model, tmp_path):
    def written(output_format):
        return mine_theirs(texts, model, output_format, range_max=EVERY, max_score=0.3, output_scores=True)

    theirs, path = written("n-tuple"), tmp_path / "theirs.jsonl"
    columns, labels = theirs.column_names[:-1], ",".join(f"score_{number}" for number in range(1 + NEGATIVES))
    theirs.map(  # as the page writes
        lambda row: {f"score_{number}": score for number, score in enumerate(row["scores"])}, remove_columns="scores"
    ).to_json(path)
    np.testing.assert_allclose(FORMS["pairs"].read(path, columns, labels).scores, theirs["scores"], atol=1e-6)
    lists = list_forms.FORMS["pairs"].read(path, columns, labels, "").lists
    np.testing.assert_allclose([ranking.grades for ranking in lists], theirs["scores"], atol=1e-6)
    (theirs := written("labeled-list")).to_json(path)
    lists = list_forms.FORMS["lists"].read(path, [ANCHOR, POSITIVE], "scores", "").lists
    assert len(lists) == len(theirs)
    for ranking, row in zip(lists, theirs):
        np.testing.assert_allclose(ranking.grades, row["scores"], atol=1e-6)
    (theirs := written("labeled-pair")).to_json(path)
    np.testing.assert_allclose(
        FORMS["scored"].read(path, [ANCHOR, POSITIVE], "score").values, theirs["score"], atol=1e-6
    )


@pytest.mark.parametrize("suffix, reader", [("jsonl", "json"), ("csv", "csv")])
def test_our_table_becomes_their_dataset(suffix, reader, texts, model, tmp_path):
    write_ours(texts, model, path := tmp_path / f"mined.{suffix}")
    ours = datasets.load_dataset(reader, data_files=str(path), split="train", cache_dir=str(tmp_path))
    names = [name for name in ours.column_names if name.startswith("score_")]
    ours = ours.map(lambda row: {"scores": [row[name] for name in names]}, remove_columns=names)  # as the page writes
    theirs = mine_theirs(texts, model, range_max=EVERY, output_scores=True)
    assert ours.column_names == ["anchor", "positive", *theirs.column_names[2:]]
    assert_same_rows([[*list(row.values())[:-1], *row["scores"]] for row in ours], theirs)
