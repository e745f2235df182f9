"""The parts of a corpus: what is in them, where they may lie, and that text that has changed is not read."""

import gzip
import json
import os
import sys

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from bertjax.config import UserError
from bertjax.data.documents import corpus, python_docs
from bertjax.data.documents.corpus import portions, read_documents, read_portion
from bertjax.data.documents.reading import Document, Reading, find_files


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


def lines_of(*sources, **reading):
    return [document.lines for document in read_documents([str(source) for source in sources], Reading(**reading))]


def test_portions_group_files_by_size_and_give_the_whole_corpus(tmp_path, monkeypatch):
    documents = tuple(Document(f"{i}", [f"document {i}"]) for i in range(3))
    monkeypatch.setattr(python_docs, "read_documents", lambda: documents)
    monkeypatch.setattr(corpus, "PORTION_BYTES", 100)
    monkeypatch.setattr(corpus, "FILE_BYTES", 20)
    write(tmp_path, a="a" * 60, b="b" * 60, c="c" * 500, d="d", e="e", f="f", g="g", h="h", i="i")
    sources = [str(tmp_path), "pydoc", f"{tmp_path}/c.txt"]
    parts = portions(sources)
    names = ["".join(os.path.basename(path)[0] for path in part.files) for part in parts]
    assert names == ["ab", "c", "defgh", "i", "", "c"]
    assert [(p.number, p.bytes) for p in parts] == list(enumerate([120, 500, 5, 1, 0, 500]))
    assert [p.source for p in parts] == [*4 * [sources[0]], *sources[1:]]
    assert parts == portions(sources)
    assert len({p.identity for p in parts}) == 5 and parts[1].identity == parts[5].identity  # c.txt twice
    read = [document for part in parts for document in read_portion(part)]
    assert read == list(read_documents(sources)) and len(read) == 10 + 3


def test_another_text_is_another_identity(tmp_path):
    write(tmp_path, a="one", b="two")
    identities = [portions([str(tmp_path)])[0].identity]
    for change in (
        lambda: write(tmp_path, b="three"),
        lambda: (tmp_path / "b.txt").rename(tmp_path / "c.txt"),
        lambda: os.utime(tmp_path / "a.txt", ns=(0, 0)),
    ):
        change()
        identities.append(portions([str(tmp_path)])[0].identity)
    assert len(set(identities)) == 4 and portions([str(tmp_path)])[0].identity == identities[-1]


def test_a_file_that_changes_or_vanishes_is_named(tmp_path):
    write(tmp_path, a="one\n\nmore", b="two")
    (part,) = portions([str(tmp_path)])
    reading = read_portion(part)
    assert next(reading).lines == ["one"]
    write(tmp_path, a="one\n\nmore\n\nappended")
    for rest in (reading, read_portion(part)):
        with pytest.raises(UserError, match=r"a.txt: changed while the corpus was read"):
            list(rest)
    (part,) = portions([str(tmp_path)])
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match=r"b.txt: cannot be read \(.*No such file"):
        list(read_portion(part))


def test_one_empty_file_of_many_is_fine(tmp_path):
    write(tmp_path, a="", b="text", c=" \n\n")
    assert lines_of(tmp_path) == [["text"]]
    for name in "ac":
        with pytest.raises(UserError, match=rf"data.corpus: '.*{name}.txt' contains no text"):
            lines_of(tmp_path / "b.txt", tmp_path / f"{name}.txt")


@pytest.fixture
def remote():
    """A folder of an object store."""
    store = fsspec.filesystem("memory")
    table = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), table)
    store.pipe(
        {
            "/store/b.txt": b"b",
            "/store/a #%20.txt.gz": gzip.compress(b"a"),
            "/store/sub/c.parquet": table.getvalue().to_pybytes(),
            "/store/sub/notes.md": b"no text",
        }
    )
    yield "memory://store"
    store.rm("/store", recursive=True)


def test_text_on_an_object_store_is_listed_and_read_as_on_a_disk(remote):
    documents = list(read_documents([remote]))
    assert [d.lines for d in documents] == [["a"], ["b"], ["one"], ["two"]]
    assert [d.source for d in documents[1:3]] == [f"{remote}/b.txt:1", f"{remote}/sub/c.parquet:1"]
    assert list(read_documents([f"{remote}/"])) == list(read_documents([f"{remote}/**/*.*"])) == documents
    assert [f.path for f in find_files(f"{remote}/*.txt*")] == [f"{remote}/a #%20.txt.gz", f"{remote}/b.txt"]
    assert [f.path for f in find_files(f"{remote}/b.txt")] == [f"{remote}/b.txt"]


def test_what_is_not_on_an_object_store_is_named(remote):
    for source, message in {
        "memory://none": "data.corpus: no file or folder 'memory://none'",
        f"{remote}/none.txt": f"data.corpus: no file or folder '{remote}/none.txt'",
        f"{remote}/*.jsonl": r"no text files in 'memory://store/\*.jsonl'",
        f"{remote}/sub/notes.md": "cannot read 'memory://store/sub/notes.md'; supported are",
        "nosuch://store/a.txt": "'nosuch://store/a.txt' cannot be listed",
    }.items():
        with pytest.raises(UserError, match=message):
            portions([source])
    (part,), store = portions([f"{remote}/*.txt"]), fsspec.filesystem("memory")
    store.pipe("/store/b.txt", b"longer")
    with pytest.raises(UserError, match=r"memory://store/b.txt: changed while"):
        list(read_portion(part))
    store.rm("/store/b.txt")
    with pytest.raises(UserError, match=r"memory://store/b.txt: cannot be read \(no such file"):
        list(read_portion(part))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A data set of Hugging Face's library, in a folder."""
    folder = tmp_path_factory.mktemp("hub") / "set"
    folder.mkdir()
    rows = [{"text": f"line {i}.\nand another.", "body": f"body {i}", "n": i} for i in range(600)]
    rows[1]["text"], rows[2]["text"] = None, " \n"
    parquet.write_table(pyarrow.Table.from_pylist(rows[:400]), folder / "train-0.parquet", row_group_size=150)
    parquet.write_table(pyarrow.Table.from_pylist(rows[400:]), folder / "train-1.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows[:3]), folder / "test-0.parquet")
    return folder


def test_hugging_face_data_sets_are_streamed_in_the_order_of_their_files(hub):
    documents = list(read_documents([f"hf:{hub}"]))
    assert [d.lines[0] for d in documents] == [f"line {i}." for i in range(600) if i not in (1, 2)]
    assert documents[1].source == f"hf:{hub} example 4" and documents[1].lines == ["line 3.", "and another."]
    assert lines_of(f"hf:{hub}:test") == [["line 0.", "and another."]]
    assert lines_of(f"hf:{hub}:test:body") == [[f"body {i}"] for i in range(3)]
    assert len(lines_of(f"hf:{hub}::body")) == len(lines_of(f"hf:{hub}", text_column="body")) == 600


@pytest.mark.parametrize(
    "rest, message",
    [
        (":validation", r"cannot be read after example 0 \(Bad split: validation. Available splits: .*train"),
        (":test:title", r"COLUMN = 'title': 'hf:.*' has no such column; it has text, body, n"),
        ("::n", r"COLUMN = 'n': 'hf:.*' has int64 there, not text"),
        ("#other", r"data.corpus: 'hf:.*#other' cannot be loaded \(BuilderConfig 'other' not found"),
        ("-none", r"data.corpus: 'hf:.*-none' cannot be loaded \(Couldn't find any data file"),
        (":a:b:c", r"write hf:NAME\[#CONFIGURATION\]\[:SPLIT\[:COLUMN\]\]"),
    ],
)
def test_what_a_hugging_face_data_set_has_not_is_one_line(hub, rest, message):
    with pytest.raises(UserError, match=message) as caught:
        lines_of(f"hf:{hub}{rest}")
    assert "\n" not in str(caught.value)


def test_the_setting_is_named_that_gives_a_column_of_a_hugging_face_data_set(hub):
    with pytest.raises(UserError, match=r"config.data.text_column = 'title': 'hf:.*' has no such column"):
        lines_of(f"hf:{hub}", text_column="title")


def test_a_hugging_face_data_set_that_changes_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one"}))
    (part,) = portions([f"hf:{tmp_path}"])
    assert part.files == () and [d.lines for d in read_portion(part)] == [["one"]]
    path.write_text(json.dumps({"text": "another"}))
    with pytest.raises(UserError, match=r"data.corpus: 'hf:.*' changed while the corpus was read"):
        list(read_portion(part))
    assert portions([f"hf:{tmp_path}"])[0].identity != part.identity


def test_hugging_faces_library_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"'hf:user/set' needs Hugging Face's library: pip install 'bertjax\[hf\]'"):
        portions(["hf:user/set"])
