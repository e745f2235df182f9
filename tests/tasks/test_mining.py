"""Queries, the documents they look for, and hard negatives among the others."""

import json

import numpy as np
import pytest

from bertjax.config import UserError
from bertjax.tasks import mining, searches, text_sets
from bertjax.tasks.metrics import unit
from bertjax.tasks.mining import Choice
from bertjax.tasks.searches import Search

QUERIES, DOCUMENTS = 40, 90


@pytest.fixture
def search():
    """Queries with one to three relevant documents; the text of each tenth one is a document as well."""
    rng = np.random.default_rng(0)
    relevant = [dict.fromkeys(rng.choice(80, rng.integers(1, 4), replace=False).tolist(), 1.0) for _ in range(QUERIES)]
    documents = [f"document {i}" for i in range(86)] + [f"query {i}" for i in range(0, QUERIES, 10)]
    return Search([f"query {i}" for i in range(QUERIES)], documents, relevant)


@pytest.fixture
def vectors():
    rng = np.random.default_rng(1)
    return rng.normal(size=(QUERIES, 8)).astype(np.float32), rng.normal(size=(DOCUMENTS, 8)).astype(np.float32)


CHOICES = [
    Choice(),
    Choice(3, first=5, last=20),
    Choice(2, last=500, margin=0.1),
    Choice(2, first=3, margin=0.3, is_share=True),
    Choice(4, last=30, most=0.6, least=0.1),
]


@pytest.mark.parametrize("choice", CHOICES)
def test_negatives_are_the_nearest_that_may_be_some(choice, search, vectors):
    mined = mining.mine(search, *vectors, choice)
    cosines = unit(vectors[0]) @ unit(vectors[1]).T
    expected, candidates, dropped = [], 0, 0
    for query in range(QUERIES):
        own = cosines[query, list(search.relevant[query])].min()
        others = [
            number for number in np.argsort(-cosines[query]).tolist()
            if number not in search.relevant[query] and search.documents[number] != search.queries[query]
        ][choice.first - 1 : choice.last]  # fmt: skip
        limit = own - choice.margin * abs(own) if choice.is_share else own - choice.margin
        left = [i for i in others if choice.least <= cosines[query, i] <= min(limit, choice.most)]
        candidates, dropped = candidates + len(others), dropped + len(others) - len(left)
        if len(left) >= choice.negatives:
            expected.append((query, left[: choice.negatives]))
    assert mined.rows == expected and 0 < len(expected)
    assert mined.candidates == candidates and mined.dropped.total() == dropped
    assert (dropped > 0) == (choice not in CHOICES[:2])
    near, far = zip(*[(cosines[q, list(search.relevant[q])].mean(), cosines[q, found].mean()) for q, found in expected])
    assert mined.cosines == pytest.approx((np.mean(near), np.mean(far)), abs=1e-5)


def test_negatives_are_drawn_by_a_seed_from_all_that_may_be_some(search, vectors):
    def drawn(seed, queries=slice(None)):
        return dict(mining.mine(search, *vectors, Choice(2, first=2, last=11, seed=seed)).rows)

    may_be = dict(mining.mine(search, *vectors, Choice(10, first=2, last=11)).rows)
    found = [drawn(seed) for seed in range(40)]
    assert found[3] == drawn(3) and found[3] != found[4]
    for query, all_of_it in may_be.items():
        seen = {number for each in found for number in each[query]}
        assert seen == set(all_of_it)
        places = [[all_of_it.index(number) for number in each[query]] for each in found]
        assert all(first < second for first, second in places)


def test_the_table_is_training_data(search, vectors, tmp_path):
    # Documents are near their queries, but for those of the first one: none is far enough below.
    queries, documents = vectors
    for query in reversed(range(QUERIES)):
        documents[list(search.relevant[query])] = queries[query] if query else -queries[query]
    choice = Choice(2, last=20, margin=0.2)
    mined = mining.mine(search, queries, documents, choice)
    for name in ("mined.jsonl", "mined.csv"):
        lines = list(mining.write(tmp_path / name, search, mined, choice))
        source = text_sets.Source("data", str(tmp_path / name), "pairs", "anchor,positive,negative_1,negative_2", "")
        rows = dict(mined.rows)
        expected = [
            (search.queries[query], *(search.documents[number] for number in (relevant, *rows[query])))
            for query in rows for relevant in search.relevant[query]
        ]  # fmt: skip
        assert text_sets.read(source, "train").texts == expected
        assert lines[0] == (
            f"2 negatives for {len(rows)} of {QUERIES} queries: {len(expected)} rows in {tmp_path / name}"
        )
        assert "candidates have ranks from 1 to 20;" in lines[1] and "nearer than the margin allows" in lines[1]
        assert lines[2] == f"{QUERIES - len(rows)} queries were dropped: they have fewer than 2 negatives"
        assert 0 not in rows and len(rows) < QUERIES
    strict = Choice(2, margin=5.0)
    none = mining.mine(search, queries, documents, strict)
    with pytest.raises(UserError, match=r"none of 40 queries has 2 negatives: .* were nearer than the margin allows"):
        list(mining.write(tmp_path / "none.csv", search, none, strict))
    assert not list(tmp_path.glob("none*"))


def test_each_text_occurs_once_in_a_merged_search():
    twice = Search(["a", "a", "b"], ["x", "y", "x", "z"], [{0: 1.0}, {1: 2.0}, {2: 1.0}])
    found = searches.merged(twice, ["z", "more", "more", "y"])
    assert set(found.texts) == {("a", "x"), ("a", "y"), ("b", "x")} and len(found.texts) == 3
    assert sorted(found.documents) == ["more", "x", "y", "z"] and list(found.queries) == ["a", "b"]


# BEIR's layout.


def write_beir(folder, corpus, queries, **qrels):
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, rows in qrels.items():
        lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, row)) for row in rows)]
        (folder / "qrels" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder


CORPUS = [
    {"_id": "d2", "title": "Ships", "text": "They sail."},
    {"_id": "d10", "title": "", "text": "Bread is baked."},
    {"_id": "d1", "text": "Bread is baked."},
]
ASKED = [{"_id": "q1", "text": "what sails?"}, {"_id": "q2", "text": "bread?"}, {"_id": "q3", "text": "what sails?"}]


def flagged(folder):
    return text_sets.Flagged("", str(folder), "search", "", "")


def test_a_search_is_read_as_beir_writes_it(tmp_path):
    qrels = dict(train=[("q2", "d1", 1)], dev=[("q3", "d2", 2), ("q1", "d10", 0), ("q2", "d1", 1), ("q2", "d2", -1)])
    folder = write_beir(tmp_path / "sea", CORPUS, ASKED, **qrels)
    found = text_sets.read_search(flagged(folder), "dev")
    # Documents in the order of their ids, which are text; equal ones are two. The query without a document is none.
    assert found.documents == ["Bread is baked.", "Bread is baked.", "Ships They sail."]
    assert found.queries == ["what sails?", "bread?"] and found.relevant == [{2: 2.0}, {0: 1.0}]
    assert text_sets.read(flagged(folder), "train").texts == [("bread?", "Bread is baked.")]
    assert text_sets.read_search(flagged(folder / "qrels/dev.tsv"), "train") == found


@pytest.mark.parametrize("corpus, queries, qrels, message", [
    (CORPUS, ASKED, [("q1", "d3", 1)], r"dev.tsv:2: 'd3', which is relevant to query 'q1', is not in .*/corpus"),
    (CORPUS, ASKED, [("q1", "d1", 1), ("q9", "d1", 1)], r"dev.tsv:3: no query 'q9' in .*queries.jsonl"),
    (CORPUS, ASKED, [("q1", "d1", 0)], r"dev.tsv: no score is above 0, so that no query has a relevant document"),
    (CORPUS, ASKED, [("q1", "d1", "much")], r"dev.tsv:2: score is 'much', expected a number"),
    ([], ASKED, [("q1", "d1", 1)], r"corpus.jsonl: no example in it"),
    (CORPUS * 2, ASKED, [("q1", "d1", 1)], r"corpus.jsonl:4: a second text with the _id 'd2'"),
    ([{"_id": "d1", "body": "x"}], ASKED, [("q1", "d1", 1)], r"corpus.jsonl:1: no column 'text'; there are _id"),
])  # fmt: skip
def test_what_is_wrong_in_a_search_is_named(corpus, queries, qrels, message, tmp_path):
    with pytest.raises(UserError, match=message):
        text_sets.read_search(flagged(write_beir(tmp_path, corpus, queries, dev=qrels)), "dev")


def test_files_that_a_folder_has_not_or_has_twice_are_named(tmp_path):
    folder = write_beir(tmp_path, CORPUS, ASKED, dev=[("q1", "d1", 1)], test=[("q2", "d1", 1)])
    with pytest.raises(UserError, match=r"^--data=.*: both qrels/test.tsv and qrels/dev.tsv in it; name the file$"):
        text_sets.read_search(flagged(folder), "test", "dev")
    with pytest.raises(UserError, match=r"^--data=.*: no qrels/train.tsv in it$"):
        text_sets.read_search(flagged(folder), "train")
    with pytest.raises(UserError, match=r"^--form=scored: choose one of pairs, squad, search$"):
        text_sets.read_training_search(str(folder), "scored", "anchor,positive")


def test_documents_are_lines_or_rows(tmp_path):
    (tmp_path / "some.txt").write_text("one\n\n two \n")
    assert searches.read_documents(tmp_path / "some.txt") == ["one", "two"]
    write_beir(tmp_path, CORPUS, ASKED)
    assert searches.read_documents(tmp_path / "corpus.jsonl")[0] == "Ships They sail."
    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(UserError, match=r"none.txt: no text in it"):
        searches.read_documents(tmp_path / "none.txt")
