"""A search index of documents: the nearest documents, the folder that later searches read, and refused mistakes."""

import json
import shutil
import types

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bertjax.common.errors import UserError
from bertjax.embedding import index as module
from bertjax.embedding import retrieval
from bertjax.embedding.head import PromptedEmbedder
from bertjax.embedding.index import SearchIndex
from bertjax.finetuning import metrics
from bertjax.inference import text_embedding
from bertjax.interop import pretrained
from tests.inference.test_vectors import texts_of
from tests.interop.test_golden import edit
from tests.processes import run

TEXTS = [text or "empty" for text in texts_of(38)]
QUERIES = ["the ship", "bread and butter", "a judge"]
SETTINGS = "config_sentence_transformers.json"


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    """A folder of sentence-transformers with prompts, which compares by dot products."""
    folder = tmp_path_factory.mktemp("sentence-transformers") / "model"
    shutil.copytree(checkpoint, folder)
    kinds = ("", "Transformer"), ("1_Pooling", "Pooling")
    rows = [dict(idx=i, name=str(i), path=path, type=f"sentence_transformers.models.{kind}")
            for i, (path, kind) in enumerate(kinds)]  # fmt: skip
    prompts = {"query": "ask : ", "document": "tell : "}
    contents = {
        "modules.json": rows,
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        SETTINGS: {"prompts": prompts, "similarity_fn_name": "dot"},
    }
    (folder / "1_Pooling").mkdir()
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def opened(path):
    return types.SimpleNamespace(source=pretrained.read_with_tokenizer(path))


@pytest.fixture(scope="module")
def model(folder):
    return opened(folder)


@pytest.fixture(scope="module")
def plain(checkpoint):
    """A checkpoint that was not trained for embeddings."""
    return opened(checkpoint)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "docs.txt").write_text("\n\n".join(TEXTS))
    return tmp_path / "docs.txt"


def best(queries, documents, count):
    """Returns numbers and scores of the documents with the highest dot products, by comparing all pairs."""
    scores = queries @ documents.T
    order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
    return order, np.take_along_axis(scores, order, 1)


def test_the_index_equals_a_comparison_of_all_pairs(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 7)
    index = SearchIndex.build(model, corpus, tmp_path / "index")
    embeddings = [
        PromptedEmbedder(model.source, prompt)(texts)[0]
        for prompt, texts in (("ask : ", QUERIES), ("tell : ", TEXTS))
    ]  # fmt: skip
    order, scores = best(*embeddings, 4)
    hits = index.search(QUERIES, top_k=4)
    assert [[hit.text for hit in row] for row in hits] == [[TEXTS[i] for i in row] for row in order]
    assert [[hit.id for hit in row] for row in hits] == [[str(2 * i + 1) for i in row] for row in order]  # lines
    np.testing.assert_allclose([[hit.score for hit in row] for row in hits], scores, rtol=1e-4)
    assert index.similarity == "dot" and len(index) == len(TEXTS)
    assert {len(row) for row in index.search(QUERIES[:1], top_k=500)} == {len(TEXTS)} and index.search([]) == []
    (alone,) = index.search(QUERIES[0], 4)  # a product of other shapes, which may round differently
    assert [hit.id for hit in alone] == [hit.id for hit in hits[0]]
    np.testing.assert_allclose([hit.score for hit in alone], [hit.score for hit in hits[0]], rtol=1e-5)


def test_a_later_search_reads_only_the_index_folder(model, corpus, tmp_path, monkeypatch):
    index = SearchIndex.build(model, corpus, tmp_path / "index")
    names = {path.name for path in (tmp_path / "index").iterdir()}
    assert names == {module.DESCRIPTION, module.DOCUMENTS, module.EMBEDDINGS}
    monkeypatch.setattr(text_embedding, "write_embeddings", None)  # no document is encoded again
    assert SearchIndex.build(model, corpus, tmp_path / "index").search(QUERIES) == index.search(QUERIES)
    corpus.unlink()
    (tmp_path / "index").rename(tmp_path / "moved")
    assert SearchIndex.open(model, tmp_path / "moved").search(QUERIES) == index.search(QUERIES)


def test_an_interrupted_index_is_completed_without_the_corpus(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text_embedding, "PORTION_TEXTS", 8)
    expected = SearchIndex.build(model, TEXTS)  # in a temporary folder
    calls, embeddings = [], text_embedding.TextEmbedder.__call__

    def stopping(self, texts):
        calls.append(len(texts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return embeddings(self, texts)

    monkeypatch.setattr(text_embedding.TextEmbedder, "__call__", stopping)
    with pytest.raises(KeyboardInterrupt):
        SearchIndex.build(model, iter(TEXTS), tmp_path / "index")
    completed = SearchIndex.open(model, tmp_path / "index")
    assert "resuming after 16 texts" in capsys.readouterr().out
    assert calls[:3] == [8, 8, 8] and sum(calls[3:]) == len(TEXTS) - 16
    assert completed.search(QUERIES) == expected.search(QUERIES)


def test_any_checkpoint_searches_with_pooled_states(plain):
    documents = [(text, f"d{i}") for i, text in enumerate(TEXTS)]
    index = SearchIndex.build(plain, documents, pool="mean")
    pooled = text_embedding.PooledStatesEmbedder(plain.source, "last", "mean")
    order, scores = best(*(metrics.l2_normalize(pooled(texts)[0]) for texts in (QUERIES, TEXTS)), 5)
    hits = index.search(QUERIES)
    assert [[hit.id for hit in row] for row in hits] == [[f"d{i}" for i in row] for row in order]
    np.testing.assert_allclose([[hit.score for hit in row] for row in hits], scores, rtol=1e-4)
    with pytest.raises(
        UserError, match=r": was not trained for embeddings; choose a run of embed or .* pool='mean'\)$"
    ):
        SearchIndex.build(plain, documents)
    with pytest.raises(UserError, match=r"^pool = 'max': choose one of mean, cls, last$"):
        SearchIndex.build(plain, documents, pool="max")


@pytest.fixture
def index(plain, corpus, tmp_path):
    SearchIndex.build(plain, corpus, tmp_path / "index", "mean")
    return tmp_path / "index"


def test_another_checkpoint_or_corpus_is_refused(plain, model, folder, corpus, index, tmp_path):
    assert len(SearchIndex.open(plain, index)) == len(TEXTS)  # pooled like the index
    with pytest.raises(UserError, match=r"index: was built with pool = 'mean', not 'cls'; use 'mean', or name a new"):
        SearchIndex.open(plain, index, "cls")
    SearchIndex.build(model, corpus, tmp_path / "dot")
    shutil.copytree(folder, tmp_path / "other")
    edit(tmp_path / "other" / SETTINGS, similarity_fn_name="cosine")
    with pytest.raises(UserError, match=r"dot: was built with similarity = 'dot', not 'cosine'; use 'dot', or name"):
        SearchIndex.open(opened(tmp_path / "other"), tmp_path / "dot")
    trained_longer = opened(folder)
    trained_longer.source.params["bert"] = jax.tree.map(lambda x: x + 1, trained_longer.source.params["bert"])
    with pytest.raises(UserError, match=r"dot: was built with another checkpoint than .*model; name the checkpoint of"):
        SearchIndex.open(trained_longer, tmp_path / "dot")
    corpus.write_text("the whale\n")
    with pytest.raises(UserError, match=r"index: has 38 other documents than .*docs.txt with 1; leave out the corpus"):
        SearchIndex.build(plain, corpus, index, "mean")


def test_a_folder_without_an_index_is_refused(plain, index, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/notes.md").write_text("mine")
    with pytest.raises(
        UserError, match=r"texts: has no index.json, but other files such as notes.md; name a new folder"
    ):
        SearchIndex.build(plain, TEXTS, tmp_path / "texts", "mean")
    with pytest.raises(UserError, match=r"^index = .*texts: has no index.json; name a corpus to write an index, or"):
        SearchIndex.open(plain, tmp_path / "texts")
    with pytest.raises(UserError, match=r"^index = gs://bucket/index: must be a local folder"):
        SearchIndex.open(plain, "gs://bucket/index")
    np.save(index / module.EMBEDDINGS, np.zeros((3, 32), np.float32))
    with pytest.raises(UserError, match=r"embeddings.npy: has 3 rows, expected 38; delete the file, and it is"):
        SearchIndex.open(plain, index)
    edit(index / module.DESCRIPTION, format=2)
    with pytest.raises(UserError, match=r"index.json: format = 2, expected 1; delete .*, and build the index again$"):
        SearchIndex.open(plain, index)


@pytest.mark.parametrize("documents, message", [
    ([], r"^documents: has no document, expected at least 1$"),
    (["a", 3], r"^documents\[1\] = 3: must be a text, or a tuple of text and id$"),
    ("none.txt", r"^none.txt: no such file; correct the path$"),
    ("docs.gz", r"^corpus = docs.gz: must end in one of .txt, .jsonl, .csv, .tsv, .parquet$"),
])  # fmt: skip
def test_documents_that_cannot_be_read_are_refused(documents, message, plain, tmp_path):
    with pytest.raises(UserError, match=message):
        SearchIndex.build(plain, documents, tmp_path / "index", "mean")


@pytest.mark.parametrize("arguments, message", [
    (dict(queries=["a", None]), r"^queries\[1\] = None: must be a str$"),
    (dict(queries="a", top_k=0), r"^top_k = 0: must be an integer of at least 1$"),
])  # fmt: skip
def test_queries_that_are_not_texts_are_refused(arguments, message, plain):
    with pytest.raises(UserError, match=message):
        SearchIndex.build(plain, TEXTS[:1], pool="mean").search(**arguments)


# Files of documents.


def test_documents_have_the_ids_of_a_table_or_the_numbers_of_lines(tmp_path):
    def read(name):
        return list(retrieval.documents_of(tmp_path / name))

    (tmp_path / "a.txt").write_text("one\n\n two \n")
    assert read("a.txt") == [("one", "1"), ("two", "3")]
    (tmp_path / "a.csv").write_text("id,title,text\n7,Ships,They sail.\nx,,Bread.\n")
    expected = [("Ships They sail.", "7"), ("Bread.", "x")]
    assert read("a.csv") == expected
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read("a.jsonl") == [("one", "1"), ("two", "2")]
    columns = {"more": [1, 2], "_id": ["7", "x"], "text": ["They sail.", "Bread."], "title": ["Ships", None]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert read("a.parquet") == expected
    texts = [text for text, _ in retrieval.documents_of(tmp_path / "a.parquet")]
    assert texts == ["Ships They sail.", "Bread."]
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "b.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "c.parquet")
    (tmp_path / "d.parquet").write_text("text\nno Parquet\n")
    (tmp_path / "e.txt").write_bytes(b"one\n\xe9\n")
    for name, message in (
        ("b.parquet", r"b.parquet: no column 'text'; rename one of the columns body$"),
        ("c.parquet", r"c.parquet: has no example; add at least one$"),
        ("d.parquet", r"d.parquet: cannot be read as Parquet after row 0 \(.+\)$"),
        ("e.txt", r"e.txt:2: not UTF-8 \("),
        ("f.parquet", r"^.*f.parquet: no such file; correct the path$"),
    ):
        with pytest.raises(UserError, match=message):
            read(name)


# The command.


def test_the_command_writes_and_reuses_an_index(folder, corpus, tmp_path):
    arguments = f"--checkpoint={folder}", "--dtype=float32", "--index=kept", "--top_k=2"
    first = run("search", *arguments, f"--corpus={corpus}", *QUERIES[:2], cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert [lines[0], lines[3]] == QUERIES[:2] and len(lines) == 6
    assert first.stderr.endswith(f"next:\n  bertjax search {folder} --index=kept 'a query'\n")
    corpus.unlink()
    again = run("search", *arguments, "--json", QUERIES[0], cwd=tmp_path)
    (result,) = map(json.loads, again.stdout.splitlines())
    assert result["query"] == QUERIES[0] and len(result["hits"]) == 2, again.stderr
    for line, hit in zip(lines[1:3], result["hits"]):
        assert line == f"  {hit['score']:.3f}  {hit['id']}: {hit['text']}"
    refused = run("search", f"--checkpoint={folder}", "--dtype=bfloat16", "--index=kept", "a", cwd=tmp_path)
    message = "error: index = kept: was built with dtype = 'float32', not 'bfloat16'; use 'float32', or name a new"
    assert refused.returncode == 1 and refused.stderr.startswith(message) and refused.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments, message", [
    ([], "no query for the checkpoint 'nowhere': give one or more on the command line, as in bertjax search nowhere "
         '"a query"'),
    (["a"], "no documents: name a corpus, or the folder of an index"),
    (["a", "--corpus=none.txt"], "none.txt: no such file; correct the path"),
    (["a", "--corpus=empty.txt"], "empty.txt: has no text; add at least one"),
    (["a", "--index=none"], "index = none: has no index.json; name a corpus to write an index, or another folder"),
])  # fmt: skip
def test_invalid_searches_are_refused_in_one_line(arguments, message, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    result = run("search", "--checkpoint=nowhere", *arguments, cwd=tmp_path)
    assert result.returncode == 1 and result.stderr == f"error: {message}\n"
