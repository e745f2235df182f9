"""Queries, nearest documents and hard negatives; a run of the task embed, and the commands that use its embeddings."""

import dataclasses
import json
import random
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from bertjax.common.errors import UserError
from bertjax.config.experiments import load
from bertjax.data.loading.examples import Examples
from bertjax.embedding import datasets, evaluators, mining, neighbors, retrieval, stored_texts
from bertjax.embedding import task as embed
from bertjax.embedding.head import PromptedEmbedder
from bertjax.embedding.mining import Choice
from bertjax.embedding.stored_texts import StoredTexts
from bertjax.finetuning import metrics
from bertjax.finetuning import run as finetuning_run
from bertjax.interop import pretrained
from bertjax.launch.validate import validate
from bertjax.library import checkpoints as library
from bertjax.reranking import sets
from bertjax.reranking.ranking import Ranker
from tests.conftest import TOPICS
from tests.finetuning.test_classify import write_table
from tests.finetuning.test_finetuning import run
from tests.interop.test_golden import edit
from tests.processes import ROOT
from tests.processes import run as command

QUERIES, DOCUMENTS = 40, 90


@pytest.fixture
def search():
    """Queries with one to three relevant documents; the text of every tenth query is also a document."""
    rng = np.random.default_rng(0)
    relevant = [dict.fromkeys(rng.choice(80, rng.integers(1, 4), replace=False).tolist(), 1.0) for _ in range(QUERIES)]
    documents = [f"document {i}" for i in range(86)] + [f"query {i}" for i in range(0, QUERIES, 10)]
    return retrieval.Search([f"query {i}" for i in range(QUERIES)], documents, relevant)


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
def test_negatives_are_the_nearest_allowed_documents(choice, search, vectors):
    mined = mining.mine_negatives(search, *vectors, choice)
    cosines = metrics.l2_normalize(vectors[0]) @ metrics.l2_normalize(vectors[1]).T
    expected, candidates, dropped, inverted = [], 0, 0, 0
    for query in range(QUERIES):
        lowest_relevant = cosines[query, list(search.relevant[query])].min()
        ranked = [
            number for number in np.argsort(-cosines[query]).tolist()
            if number not in search.relevant[query] and search.documents[number] != search.queries[query]
        ][choice.first - 1 : choice.last]  # fmt: skip
        limit = (
            lowest_relevant - choice.margin * abs(lowest_relevant)
            if choice.is_share
            else lowest_relevant - choice.margin
        )
        left = [i for i in ranked if choice.least <= cosines[query, i] <= min(limit, choice.most)]
        candidates, dropped = candidates + len(ranked), dropped + len(ranked) - len(left)
        if len(left) >= choice.negatives:
            expected.append((query, left[: choice.negatives]))
            inverted += cosines[query, left[0]] > lowest_relevant
    assert mined.inverted == inverted and (inverted > 0) == (choice.margin <= 0)
    assert mined.rows == expected and 0 < len(expected)
    assert mined.candidates == candidates and mined.dropped.total() == dropped
    assert (dropped > 0) == (choice not in CHOICES[:2])
    near, far = zip(
        *[(cosines[q, list(search.relevant[q])].mean(), cosines[q, negatives].mean()) for q, negatives in expected]
    )
    assert mined.cosines == pytest.approx((np.mean(near), np.mean(far)), abs=1e-5)


def test_negatives_are_sampled_by_seed_from_the_allowed_documents(search, vectors):
    def drawn(seed, queries=slice(None)):
        return dict(mining.mine_negatives(search, *vectors, Choice(2, first=2, last=11, seed=seed)).rows)

    may_be = dict(mining.mine_negatives(search, *vectors, Choice(10, first=2, last=11)).rows)
    samples = [drawn(seed) for seed in range(40)]
    assert samples[3] == drawn(3) and samples[3] != samples[4]
    for query, all_of_it in may_be.items():
        seen = {number for sample in samples for number in sample[query]}
        assert seen == set(all_of_it)
        places = [[all_of_it.index(number) for number in sample[query]] for sample in samples]
        assert all(first < second for first, second in places)


def test_the_table_of_negatives_is_valid_training_data(search, vectors, tmp_path):
    # Documents are near their queries, except the documents of the first query, which has no candidates below the
    # margin.
    queries, documents = vectors
    for query in reversed(range(QUERIES)):
        documents[list(search.relevant[query])] = queries[query] if query else -queries[query]
    choice = Choice(2, last=20, margin=0.1)
    mined = mining.mine_negatives(search, queries, documents, choice)
    for name in ("mined.jsonl", "mined.csv"):
        lines = list(mining.write_negatives(tmp_path / name, search, mined, choice))
        source = datasets.Source("data", str(tmp_path / name), "pairs", "anchor,positive,negative_1,negative_2", "")
        rows = dict(mined.rows)
        expected = [
            (search.queries[query], *(search.documents[number] for number in (relevant, *rows[query])))
            for query in rows for relevant in search.relevant[query]
        ]  # fmt: skip
        assert datasets.read_set(source, "train").texts == expected
        summary = f"2 negatives for {len(rows)} of {QUERIES} queries: {len(expected)} rows in {tmp_path / name}"
        assert lines[0] == summary
        assert "candidates have ranks from 1 to 20;" in lines[1] and "nearer than the margin allows" in lines[1]
        assert lines[2] == f"{QUERIES - len(rows)} queries were dropped: they have fewer than 2 negatives"
        assert 0 not in rows and len(rows) < QUERIES and len(lines) == 4
    strict = Choice(2, margin=5.0)
    none = mining.mine_negatives(search, queries, documents, strict)
    reason = (
        "none of 40 queries has 2 negatives: .* were nearer than the margin allows; lower --margin, or raise --last"
    )
    with pytest.raises(UserError, match=reason):
        list(mining.write_negatives(tmp_path / "none.csv", search, none, strict))
    assert not list(tmp_path.glob("none*"))


def test_mining_warns_of_probable_mistakes(search, vectors, tmp_path):
    def lines(choice):
        mined = mining.mine_negatives(search, *vectors, choice)
        printed = list(mining.write_negatives(tmp_path / "mined.csv", search, mined, choice))
        return len(mined.rows), [line for line in printed if line.startswith("warning: ")]

    for choice, why in (
        (Choice(last=500, margin=1.1), "dropped candidates were nearer than the margin allows; lower"),
        (Choice(last=9, most=0.45), "dropped candidates were above the highest allowed cosine; raise --max_score"),
        (Choice(DOCUMENTS - 1, last=DOCUMENTS), "there are too few documents; name more documents with --corpus"),
    ):
        rows, (dropped, *_) = lines(choice)
        assert dropped.startswith(f"warning: {QUERIES - rows} of {QUERIES} queries were dropped: ") and why in dropped
    rows, (inverted,) = lines(Choice())
    assert re.match(rf"warning: \d+ of {rows} queries have a negative with a higher score .*; --margin=0 ", inverted)
    assert rows == QUERIES and not lines(Choice(last=500, margin=0.0))[1]


def test_merged_retrieval_sets_have_no_duplicate_texts():
    twice = retrieval.Search(["a", "a", "b"], ["x", "y", "x", "z"], [{0: 1.0}, {1: 2.0}, {2: 1.0}])
    merged = retrieval.without_duplicates(twice)
    assert set(merged.texts) == {("a", "x"), ("a", "y"), ("b", "x")} and len(merged.texts) == 3
    assert sorted(merged.documents) == ["x", "y", "z"] and list(merged.queries) == ["a", "b"]


def test_a_corpus_on_the_disk_has_no_duplicate_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_texts, "BATCH", 3)
    first, more = ["z", "é"], ["one", "z", "two", "one", "", "é", "three", "two", "four", "one", "five"]
    texts = StoredTexts.write(tmp_path / "texts.arrow", first, more)
    expected = list(dict.fromkeys([*first, *more]))
    assert list(texts) == expected == [texts[number] for number in range(len(texts))] and len(texts) == 8
    assert texts[-1] == "five" and texts[1:3] == ["é", "one"]
    with pytest.raises(IndexError):
        texts[8]
    assert list(StoredTexts.write(tmp_path / "texts.arrow", first, [])) == first


# Exact nearest neighbours in blocks.


@pytest.fixture
def small_blocks(monkeypatch):
    for name, size in (("QUERIES", 128), ("DOCUMENTS", 192), ("ROUND", 64)):
        monkeypatch.setattr(neighbors, name, size)


@pytest.mark.parametrize("k", [1, 20, 1000])  # fewer neighbours than a block has, and more than there are documents
def test_nearest_neighbours_equal_a_full_comparison_with_stable_ties(k, small_blocks):
    rng = np.random.default_rng(0)
    # Cosines are exact multiples of 1/8, so that hundreds are equal.
    queries, documents = (rng.choice([-1.0, 1.0], (count, 16)) for count in (301, 517))
    cosines = queries @ documents.T / 16
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    nearest = neighbors.nearest(queries, documents, k)
    assert (nearest.numbers == order).all()
    np.testing.assert_array_equal(nearest.cosines, np.take_along_axis(cosines, order, 1))


@pytest.mark.parametrize("count", [1, 3])
def test_neighbours_do_not_depend_on_the_number_of_devices_or_on_the_memory(count, small_blocks, monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    queries, documents = (rng.choice([-1.0, 1.0], (rows, 16)).astype(np.float32) for rows in (301, 1517))
    devices = jax.local_devices()
    assert len(devices) > count
    everywhere = neighbors.nearest(queries, documents, 250)
    np.save(tmp_path / "documents.npy", documents)
    mapped = np.load(tmp_path / "documents.npy", mmap_mode="r")
    monkeypatch.setattr(jax, "local_devices", lambda: devices[:count])
    for nearest in (neighbors.nearest(queries, documents, 250), neighbors.nearest(queries, mapped, 250)):
        for expected, actual in zip(everywhere, nearest, strict=True):
            np.testing.assert_array_equal(actual, expected)


# The layout of BEIR.


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
    return datasets.FlagSource("", str(folder), "search", "", "")


def test_beir_folders_are_read(tmp_path):
    qrels = dict(train=[("q2", "d1", 1)], dev=[("q3", "d2", 2), ("q1", "d10", 0), ("q2", "d1", 1), ("q2", "d2", -1)])
    folder = write_beir(tmp_path / "sea", CORPUS, ASKED, **qrels)
    retrieval_set = datasets.read_search(flagged(folder), "dev")
    # Documents are sorted by their ids as text; documents with equal text stay separate. Queries without documents are
    # dropped.
    assert retrieval_set.documents == ["Bread is baked.", "Bread is baked.", "Ships They sail."]
    assert retrieval_set.queries == ["what sails?", "bread?"] and retrieval_set.relevant == [{2: 2.0}, {0: 1.0}]
    assert datasets.read_set(flagged(folder), "train").texts == [("bread?", "Bread is baked.")]
    assert datasets.read_search(flagged(folder / "qrels/dev.tsv"), "train") == retrieval_set
    assert retrieval_set.identical == [-1, -1] and "id of a document" not in retrieval_set.describe("dev")


def test_a_query_does_not_retrieve_its_own_document(tmp_path):
    """As in BEIR's ArguAna, the document with the id of the query is the query."""
    asked = [{"_id": "d2", "text": "Ships sail."}, {"_id": "q", "text": "bread?"}]
    folder = write_beir(tmp_path, CORPUS, asked, dev=[("d2", "d1", 1), ("q", "d10", 1)])
    vectors, scores = np.eye(5, 4, dtype=np.float32)[[2, 1, 0, 1, 2]], {}  # queries, then d1, d10 and d2
    vectors[2] += vectors[0] / 2  # the second-best document of the first query
    for ignore in (False, True):
        source = dataclasses.replace(flagged(folder), ignore_identical_ids=ignore)
        source.validate()
        retrieval_set = datasets.read_search(source, "dev")
        encoded = datasets.EncodedTexts(Examples([], []), np.arange(5))
        scores[ignore] = evaluators.make_split(retrieval_set, encoded).score(vectors)["recall@1"]
        assert "; 1 of 2 queries have the id of a document" in retrieval_set.describe("dev")
    assert scores == {False: 0.5, True: 1.0}
    mined = mining.mine_negatives(
        retrieval.without_duplicates(retrieval_set), vectors[:2], vectors[[2, 3, 4]], Choice(2)
    )
    assert [query for query, _ in mined.rows] == [1]  # the first query has one document left
    with pytest.raises(UserError, match=r"^--ignore_identical_ids=True: is for form=search"):
        datasets.FlagSource("", "x", **datasets.PAIRS, ignore_identical_ids=True).validate()


@pytest.mark.parametrize("corpus, queries, qrels, message", [
    (CORPUS, ASKED, [("q1", "d3", 1)], r"dev.tsv:2: the document 'd3' is not in .*/corpus.jsonl; add"),
    (CORPUS, ASKED, [("q1", "d1", 1), ("q9", "d1", 1)], r"dev.tsv:3: the query 'q9' is not in .*queries.jsonl"),
    (CORPUS, ASKED, [("q1", "d1", 0)], r"dev.tsv: no score is above 0, so that no query has a relevant document"),
    (CORPUS, ASKED, [("q1", "d1", 1), ("q1", "d1", 0)], r"dev.tsv:3: the score of 'd1' for 'q1' is 0, but an earlier"),
    ([], ASKED, [("q1", "d1", 1)], r"corpus.jsonl: has no example"),
    (CORPUS * 2, ASKED, [("q1", "d1", 1)], r"corpus.jsonl:4: a second text has the _id 'd2'"),
    ([{"_id": "d1", "body": "x"}], ASKED, [("q1", "d1", 1)], r"corpus.jsonl:1: no column 'text'; the columns are _id"),
])  # fmt: skip
def test_mistakes_in_retrieval_data_are_named(corpus, queries, qrels, message, tmp_path):
    folder = write_beir(tmp_path, corpus, queries, dev=qrels)
    with pytest.raises(UserError, match=message):
        datasets.read_search(flagged(folder), "dev")
    with pytest.raises(UserError, match=message):
        sets.ListFlagSource("", str(folder), "search", "", "").read("dev")


def test_judgements_may_repeat_and_may_name_irrelevant_documents_that_are_missing(tmp_path):
    qrels = [("q1", "d1", 1), ("q1", "d1", 1), ("q1", "d9", 0), ("q9", "d1", 0)]
    folder = write_beir(tmp_path, CORPUS, ASKED, dev=qrels)
    assert len(datasets.read_search(flagged(folder), "dev").texts) == 1
    (ranking,) = sets.ListFlagSource("", str(folder), "search", "", "").read("dev").lists
    assert ranking.grades == (1.0,)


def test_missing_and_duplicate_files_of_a_folder_are_named(tmp_path):
    folder = write_beir(tmp_path, CORPUS, ASKED, dev=[("q1", "d1", 1)], test=[("q2", "d1", 1)])
    with pytest.raises(
        UserError, match=r"^--data=.*: the folder has both qrels/test.tsv and qrels/dev.tsv; name the file$"
    ):
        datasets.read_search(flagged(folder), "test", "dev")
    with pytest.raises(UserError, match=r"^--data=.*: the folder has no qrels/train.tsv; add the file$"):
        datasets.read_search(flagged(folder), "train")
    with pytest.raises(UserError, match=r"^--form=scored: choose one of pairs, squad, search$"):
        datasets.read_training_search(str(folder), "scored", "anchor,positive")


def test_documents_are_lines_or_rows(tmp_path):
    (tmp_path / "some.txt").write_text("one\n\n two \n")
    assert [text for text, _ in retrieval.documents_of(tmp_path / "some.txt")] == ["one", "two"]
    write_beir(tmp_path, CORPUS, ASKED)
    assert next(retrieval.documents_of(tmp_path / "corpus.jsonl")).text == "Ships They sail."
    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(UserError, match=r"none.txt: has no text"):
        next(retrieval.documents_of(tmp_path / "none.txt"))


# A run.


def sentence(rng, topic):
    return " ".join(rng.choices(TOPICS[topic], k=5))


def labelled_pairs(count, seed):
    """Pairs of texts about one topic (label 1) or two topics (label 0)."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        label = rng.randint(0, 1)
        topic, other = rng.sample(sorted(TOPICS), 2)
        rows.append({"a": sentence(rng, topic), "b": sentence(rng, topic if label else other), "label": label})
    return rows


def config_for(checkpoint, **data):
    config = load(str(ROOT / "experiments/embed.py"))
    config.init_checkpoint, config.max_seq_length, config.batch_size = str(checkpoint), 32, 16
    config.data.update(data)
    return config


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """(folder with labelled pairs and a BEIR folder, workdir of a finished run on the pairs)."""
    folder = tmp_path_factory.mktemp("vectors")
    write_table(folder / "train.csv", labelled_pairs(160, 0))
    write_table(folder / "dev.csv", labelled_pairs(60, 1))
    rng = random.Random(2)
    corpus = [{"_id": f"d{i:02}", "text": sentence(rng, sorted(TOPICS)[i % 4])} for i in range(40)]
    queries = [{"_id": f"q{i}", "text": sentence(rng, sorted(TOPICS)[i % 4])} for i in range(12)]
    qrels = [(f"q{i}", f"d{j:02}", 1) for i in range(12) for j in (i % 4, i % 4 + 4)]
    write_beir(folder / "beir", corpus, queries, test=qrels, train=qrels)
    config = config_for(checkpoint, path=str(folder), form="labelled", texts="a,b")
    config.loss.widths, config.epochs = "8", 2.0
    config.data.query_prompt, config.data.document_prompt = "ask : ", "tell : "
    run(config, folder / "run")
    return folder, folder / "run"


def test_a_file_is_evaluated_like_the_dev_set_with_the_tuned_thresholds(trained, tmp_path):
    folder, workdir = trained
    source = pretrained.read_pretrained(workdir)
    assert source.scores.keys() == {"average_precision", "accuracy", "f1", "average_precision_8"}
    assert source.decided.keys() == {"accuracy_threshold", "f1_threshold"} and source.scores["accuracy"] > 0.6
    arguments = ("evaluate", f"--checkpoint={workdir}", "--json", "--dtype=float32")
    result = command(*arguments, f"--data={folder}/dev.csv", cwd=tmp_path)
    again = {"scores": pytest.approx(source.scores), "decided": source.decided}
    assert json.loads(result.stdout) == again, result.stderr
    # Flags name other columns. The thresholds of the dev set stay, even if other thresholds are better for this file.
    rows = labelled_pairs(60, 5)
    cosines = [
        prediction["cosine"] for prediction in embed.TASK.predict(source, [(row["a"], row["b"]) for row in rows])
    ]
    odd = [{"c": row["a"], "d": row["b"], "same": int(cosine > 0.95)} for row, cosine in zip(rows, cosines)]
    write_table(tmp_path / "odd.csv", odd)
    result = command(*arguments, "--data=odd.csv", "--texts=c,d", "--label=same", "--widths=", cwd=tmp_path)
    scores = json.loads(result.stdout)
    predicted = np.array(cosines) >= source.decided["accuracy_threshold"]
    assert scores["scores"].keys() == {"average_precision", "accuracy", "f1"} and scores["decided"] == source.decided
    assert scores["scores"]["average_precision"] == pytest.approx(1)
    assert scores["scores"]["accuracy"] == metrics.accuracy([row["same"] for row in odd], predicted) < 1


@pytest.mark.slow
def test_retrieval_is_evaluated_with_both_prompts(trained, tmp_path):
    folder, workdir = trained
    source = pretrained.read_pretrained(workdir)
    arguments = (f"--data={folder}/beir", "--form=search", "--widths=4", "--dtype=float32")
    result = command("evaluate", f"--checkpoint={workdir}", *arguments, "--json", cwd=tmp_path)
    scores = json.loads(result.stdout)["scores"]
    assert scores.keys() == {"ndcg@10", "mrr@10", "recall@1", "recall@10", "ndcg@10_4"}, result.stderr
    search = datasets.read_training_search(f"{folder}/beir/qrels/test.tsv", "search", "")
    queries = PromptedEmbedder(source, "ask : ")(search.queries)[0]
    documents = PromptedEmbedder(source, "tell : ")(search.documents)[0]
    order = np.argsort(-(queries @ documents.T), axis=1, kind="stable")
    hits = [[number in relevant for number in row[:10].tolist()] for row, relevant in zip(order, search.relevant)]
    assert scores["recall@10"] == pytest.approx(np.sum(hits) / 24) and scores["recall@10"] < 1
    assert scores["recall@1"] == pytest.approx(np.sum(hits, 0)[0] / 24)


def test_a_checkpoint_is_evaluated_with_small_documents(trained):
    folder, workdir = trained
    options = dict(form="search", widths="")
    scores = library.evaluate(workdir, f"{folder}/beir", "float32", **options).scores
    small = library.evaluate(workdir, f"{folder}/beir", "float32", **options, precision="int8", rescore=10).scores
    assert {name: small.pop(name) for name in scores} == pytest.approx(scores)
    assert small == pytest.approx({f"{name}_int8": score for name, score in scores.items()}, abs=0.1)
    with pytest.raises(UserError, match=r"^--precision=ubinary: is for queries and documents, such as form=search"):
        library.evaluate(workdir, f"{folder}/dev.csv", precision="ubinary")


def test_mined_negatives_are_used_in_training(trained, checkpoint, tmp_path):
    folder, workdir = trained
    (tmp_path / "more.txt").write_text("the whale\nthe soup\n")
    arguments = ("mine", f"--checkpoint={workdir}", f"--data={folder}/beir", "--form=search", "--output=mined.jsonl")
    result = command(*arguments, "--corpus=more.txt", "--negatives=2", "--first=2", "--last=8", cwd=tmp_path)
    assert "computing the embeddings of 12 queries and " in result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "2 negatives for 12 of 12 queries: 24 rows in mined.jsonl", result.stderr
    assert lines[1] == "84 candidates have ranks from 2 to 8" and lines[-1].startswith("mean cosines: ")
    assert "--config.data.path=mined.jsonl --config.data.texts=anchor,positive,negative_1,negative_2" in result.stderr
    mined = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    assert list(mined[0]) == ["anchor", "positive", "negative_1", "negative_2"]
    data = dict(path=str(tmp_path / "mined.jsonl"), texts="anchor,positive,negative_1,negative_2")
    config = config_for(checkpoint, **data)
    config.data.dev.update(path=f"{folder}/beir/qrels/test.tsv", form="search")
    validate(config)
    dataset = embed.TASK.load(config, pretrained.read_tokenizer(checkpoint))
    assert dataset.metric == "ndcg@10" and len(dataset.train) == 24
    for name in ("train.csv", "dev.csv"):  # the next command evaluates the dev set of this folder
        write_table(tmp_path / name, [{name: row[name] for name in ("anchor", "positive")} for row in mined])
    again = command("mine", arguments[1], "--data=train.csv", "--output=again.jsonl", cwd=tmp_path)
    assert "--config.data.dev.path=dev.csv --config.data.dev.texts=anchor,positive --work" in again.stderr, again.stderr
    assert "12 dev queries for 40 documents: 52 texts" in dataset.notes


@pytest.fixture
def reranker(checkpoint, tmp_path):
    """The folder of a random classifier of transformers with one label."""
    folder = tmp_path / "reranker"
    shutil.copytree(checkpoint, folder)
    edit(folder / "config.json", architectures=["BertForSequenceClassification"], id2label={"0": "LABEL_0"})
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    more = {"classifier.weight": np.ones((1, 32), np.float32), "classifier.bias": np.zeros(1, np.float32)}
    safetensors.numpy.save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_reranker_filters_and_scores_negatives(trained, reranker, tmp_path):
    folder, workdir = trained
    arguments = (
        f"--checkpoint={workdir}",
        f"--data={folder}/beir",
        "--form=search",
        "--output=mined.jsonl",
        "--last=8",
    )
    result = command("mine", *arguments, f"--reranker={reranker}", "--margin=0", "--scores", cwd=tmp_path)
    assert "mean reranker's scores: " in result.stdout, result.stderr
    assert "--config.data.label=score_positive,score_negative_1 --config.distill.what=kl" in result.stderr
    rows = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    pairs = [(row["anchor"], row[name]) for row in rows for name in ("positive", "negative_1")]
    scores = Ranker(pretrained.read_with_tokenizer(str(reranker))).scores(pairs).reshape(-1, 2)
    stored = [(row["score_positive"], row["score_negative_1"]) for row in rows]
    np.testing.assert_allclose(stored, scores, atol=1e-2)
    assert all(negative <= positive for positive, negative in stored)
    assert not (tmp_path / "mined.jsonl.work").exists()
    refused = command("mine", *arguments, f"--reranker={workdir}", "--margin=0", cwd=tmp_path)
    assert refused.returncode == 1 and refused.stderr.endswith(
        "must compute one score for a pair of texts: choose the "
        "workdir of a run of rerank, a CrossEncoder, or a classifier with one label\n"
    )


def test_an_interrupted_mine_resumes_with_equal_bytes(trained, tmp_path, monkeypatch, capsys):
    folder, workdir = trained
    arguments = (str(workdir), f"{folder}/beir")
    options = dict(form="search", negatives=2, scores=True)
    library.mine(*arguments, tmp_path / "whole.csv", **options)
    header = (tmp_path / "whole.csv").read_text().partition("\n")[0]
    assert header == "anchor,positive,negative_1,negative_2,score_positive,score_negative_1,score_negative_2"
    computed, stops = [], ["documents", "nearest", "write"]
    compute, nearest, write = PromptedEmbedder.__call__, mining.nearest_of_block, mining.write_negatives

    def counted(name, function):
        def call(*inputs):
            computed.append(name)
            if stops and name == stops[0]:
                raise KeyboardInterrupt(stops.pop(0))
            return function(*inputs)

        return call

    names = {"ask : ": "queries", "tell : ": "documents"}
    monkeypatch.setattr(
        PromptedEmbedder, "__call__", lambda self, texts: counted(names[self.flags["prompt"]], compute)(self, texts)
    )
    monkeypatch.setattr(mining, "nearest_of_block", counted("nearest", nearest))
    monkeypatch.setattr(mining, "write_negatives", counted("write", write))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            library.mine(*arguments, tmp_path / "mined.csv", **options)
        assert f"the same command resumes from {tmp_path}/mined.csv.work\n" in capsys.readouterr().err
    library.mine(*arguments, tmp_path / "mined.csv", **options)
    assert computed == ["queries", "documents", "documents", "nearest", "nearest", "write", "write"]
    assert (tmp_path / "mined.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mined.csv", "whole.csv"]


@pytest.mark.parametrize("arguments, message", [
    (["--negatives=9", "--first=4", "--last=11"],
     "--negatives=9: must be at most 8, the ranks from 4 to 11; raise --last"),
    (["--first=4", "--last=3"], "--first=4: must not be above --last=3"),
    (["--margin=much"], "--margin=much: must be a number, such as 0.1, or a share, such as 5%"),
    (["--min_score=0.5", "--max_score=0.4"], "--min_score=0.5: must not be above --max_score=0.4"),
    (["--output=mined.txt"], "--output=mined.txt: must end in one of .csv, .tsv, .jsonl"),
    (["--data=nowhere"], "--data=nowhere: no such file or folder; correct the path"),
    (["--reranker=cross"],
     "--reranker=cross: no limit compares its scores; add --margin, --max_score or --min_score, or write the scores "
     "with --scores"),
])  # fmt: skip
def test_invalid_mining_is_refused_in_one_line(arguments, message, tmp_path):
    required = ("--checkpoint=run", "--data=dev.csv", "--output=mined.csv")
    result = command("mine", *required, *arguments, cwd=tmp_path)
    assert result.returncode == 1 and result.stderr == f"error: {message}\n"


@pytest.mark.parametrize("options, message", [
    (dict(widths="64"), r"^--widths=64: 64 must be at most 32, the width of an embedding$"),
    (dict(label="score"), r"dev.csv:2: no column 'score'; choose data.label from a, b, label$"),
])  # fmt: skip
def test_data_without_an_evaluation_is_refused(options, message, trained):
    folder, workdir = trained
    with pytest.raises(UserError, match=message):
        embed.TASK.read_labelled(pretrained.read_pretrained(workdir), f"{folder}/dev.csv", **options)


def test_a_checkpoint_without_embeddings_is_refused(checkpoint, trained, tmp_path):
    folder, _ = trained
    data = f"--data={folder}/beir/qrels/test.tsv", "--form=search"
    result = command("mine", f"--checkpoint={checkpoint}", *data, "--output=mined.csv", cwd=tmp_path)
    assert result.returncode == 1 and "must compute embeddings: choose the workdir of a run" in result.stderr


def test_single_sentences_are_refused_as_a_dev_set(checkpoint, trained):
    config = config_for(checkpoint, path=str(trained[0]), form="sentences", texts="a")
    with pytest.raises(UserError, match=r"^config.data.dev.form = 'sentences': single texts allow no evaluation; set"):
        validate(config)


def test_thresholds_are_tuned_on_the_file_without_a_dev_set(trained):
    folder, workdir = trained
    source = pretrained.read_pretrained(workdir)
    bare = dataclasses.replace(source, decided={})
    scores = finetuning_run.score(bare, embed.TASK.read_labelled(bare, f"{folder}/dev.csv"))
    assert scores.decided == pytest.approx(source.decided) and scores.scores == pytest.approx(source.scores)
