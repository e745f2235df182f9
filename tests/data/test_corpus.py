"""Documents of a corpus: all formats and storages, errors in one line, and files that change while they are read."""

import collections
import concurrent.futures
import functools
import gzip
import json
import lzma
import os
import random
import sys

import fsspec
import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from bertjax.common.errors import UserError
from bertjax.config.lists import mixture_of
from bertjax.data.corpus import cleaning, corpus, python_docs, sentences
from bertjax.data.corpus.corpus import corpus_portions, read_documents, read_portion
from bertjax.data.corpus.reading import Document, ReadOptions, list_files
from bertjax.data.corpus.selection import is_heldout, selection_of
from bertjax.data.corpus.tables import read_table
from bertjax.data.preprocessing import preparation
from tests.conftest import make_corpus, tiny_config

TEXT = "One line.\nAnother line.\n\n\nSecond document.\n"
LINES = [["One line.", "Another line."], ["Second document."]]
gzipped = functools.partial(gzip.compress, mtime=0)  # the workers of xdist must agree on the ids of tests
COMPRESS = {"": bytes, ".gz": gzipped, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


def lines_of(source, **reading):
    return [document.lines for document in read_documents([str(source)], ReadOptions(**reading))]


@pytest.mark.parametrize("compression", COMPRESS)
def test_text_and_json_lines_compressed_or_not(tmp_path, compression):
    txt, jsonl = tmp_path / f"a.txt{compression}", tmp_path / f"a.jsonl{compression}"
    txt.write_bytes(COMPRESS[compression](TEXT.encode()))
    objects = [{"text": "One line.\nAnother line.", "id": 1}, {"text": "Second document."}, {"text": "  "}]
    jsonl.write_bytes(COMPRESS[compression]("\n".join(map(json.dumps, objects)).encode()))
    assert lines_of(txt) == lines_of(jsonl) == LINES
    # As on Windows, with a byte order mark.
    txt.write_bytes(COMPRESS[compression](b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode()))
    assert lines_of(txt) == LINES


def write_parquet(path, **columns):
    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)


def test_columns_of_parquet_files_and_of_json_lines(tmp_path):
    texts = ["One line.\nAnother line.", None, " ", "Second document."]
    write_parquet(tmp_path / "a.parquet", body=texts, id=[1, 2, 3, 4])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts if text))
    documents = list(read_documents([str(tmp_path)], ReadOptions(text_column="body")))
    assert [d.lines for d in documents] == [*LINES, *LINES]
    assert [d.source for d in documents[:2]] == [f"{tmp_path}/a.parquet:1", f"{tmp_path}/a.parquet:4"]


def test_a_parquet_file_is_not_read_whole(tmp_path, monkeypatch):
    """Row groups before a damaged row group are read before the damage raises an error."""
    path = tmp_path / "a.parquet"
    write_parquet(path, text=[f"{i} " * 500 for i in range(20)])
    place = parquet.read_metadata(path).row_group(7).column(0).dictionary_page_offset
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + b"\xff" * 40 + whole[place + 40 :])
    monkeypatch.setattr("bertjax.data.corpus.reading.PARQUET_ROWS", 2)
    documents = read_documents([str(path)])
    assert next(documents).lines == [("0 " * 500).strip()]
    with pytest.raises(UserError, match=r"a.parquet: cannot be read as Parquet after row 14 \("):
        list(documents)


def test_bad_parquet_files_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, body=["x"], id=[1])
    remedy = "columns with text: body; set --config.data.text_column=body$"
    for column, message in (("text", "has no such column"), ("id", "has the type int64 in this column, not text")):
        with pytest.raises(UserError, match=rf"config.data.text_column = '{column}': .*a.parquet {message}; {remedy}"):
            lines_of(path, text_column=column)
    for content in (b"", b"PAR1", path.read_bytes()[:-20]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a.parquet: cannot be read as Parquet after row 0") as caught:
            lines_of(path, text_column="body")
        assert "\n" not in str(caught.value)


def test_folders_and_globs_are_sorted_and_sources_are_mixed(tmp_path):
    """A folder may have the name of a file, and links are followed."""
    for name in ("b.txt", "sub.txt/c.txt", "a.txt", "notes.md", "elsewhere.md/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"Text of {name}.")
    (tmp_path / "sub.txt/link").symlink_to("../elsewhere.md")
    names = ["a.txt", "b.txt", "elsewhere.md/d.txt", "sub.txt/c.txt", "sub.txt/link/d.txt"]
    for pattern, expected in (("", names), ("/", names), ("/**/*.txt", names), ("/[ab].txt", names[:2])):
        paths = list_files(f"{tmp_path}{pattern}").files
        assert [os.path.relpath(file.path, tmp_path) for file in paths] == expected, pattern
    mixed = [d.lines for d in read_documents([f"{tmp_path}/sub.txt", f"{tmp_path}/a.txt"])]
    assert mixed == [["Text of sub.txt/c.txt."], ["Text of elsewhere.md/d.txt."], ["Text of a.txt."]]
    (tmp_path / "sub.txt/none.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"config.data.corpus = '.*sub.txt/none.txt': no such file or folder"):
        lines_of(tmp_path)
    (tmp_path / "sub.txt/none.txt").unlink()
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("coffee")
    with pytest.raises(UserError, match=r"data.corpus: the name of b'.*/caf\\xe9.txt' is not UTF-8; rename the file$"):
        lines_of(tmp_path)


@pytest.mark.parametrize("name, content, message", [
    ("a.txt", b"", "contains no text"),
    ("a.txt", b" \n\n \n", "contains no text"),
    ("a.txt", b"fine\ncaf\xe9 au lait\n", r"a.txt:2: byte 4 of the line, 0xe9, is not UTF-8"),
    ("a.jsonl", b'{"text": "fine"}\n{"txt": 1}\n', r"a.jsonl:2: no .text. .* among txt"),
    ("a.jsonl", b'{"text": null, "txt": "x"}\n', r"a.jsonl:1: .* is null, not a string; .*on_bad_document=skip$"),
    ("a.jsonl", b'{"id": "1", "body": "Long.", "n": 2}', r"a.jsonl:1: no .text. \(config.data.text_column\) among id, "
     r"body, n; fields with text: body, id; set --config.data.text_column=body$"),
    ("a.jsonl", b"[1, 2]\n", r"a.jsonl:1: not a JSON object"),
    ("a.jsonl", b'{"text": "x", "n": ' + b"9" * 5000 + b"}", r"a.jsonl:1: not a JSON object"),
    ("a.txt.gz", b"no gzip at all", "a.txt.gz: damaged after line 0, or not .gz"),
    ("a.txt.gz", gzipped(TEXT.encode())[:-9], "a.txt.gz: cut off"),
    ("a.txt.xz", lzma.compress(TEXT.encode() * 99)[:-30], "a.txt.xz: cut off"),
    ("a.txt.zst", b"no zst at all", "a.txt.zst: damaged"),
    ("a.txt.zst", zstandard.compress(TEXT.encode())[:-3], "a.txt.zst: cut off"),
    ("a.pdf", b"%PDF", "cannot read .*a.pdf"),
    ("a.txt.gz", gzipped(gzipped(b"text")), r"not text: .*the content is compressed \(.gz\)"),
    ("a.jsonl.xz", lzma.compress(gzipped(b"text")), r"not text: .*the content is compressed \(.gz\)"),
    ("a.txt", gzipped(b"text"), r"not text: .*the file is compressed \(.gz\), unlike its name"),
    ("a.txt", b"PK\x03\x04 and so on", "not text: .*a .zip archive"),
    ("a.txt", "text".encode("utf-16"), "not text: .*UTF-16"),
])  # fmt: skip
def test_bad_files_are_named_with_their_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        lines_of(tmp_path / name)


@pytest.mark.parametrize("written, read", [
    (r"a\ud800b\udc00", "a\ufffdb\ufffd"),
    (r"\ud83d\ude00 \ude00\ud83d", "\U0001f600 \ufffd\ufffd"),  # a surrogate pair is one character
    (r"\\ud800 \"\uDBFF", r"\ud800 " + '"\ufffd'),  # a backslash and letters
])  # fmt: skip
def test_lone_surrogates_in_json_lines_become_replacement_characters(tmp_path, written, read):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{written}"}}\n')
    assert lines_of(tmp_path / "a.jsonl") == [[read]]
    assert [row.columns for row in read_table(tmp_path / "a.jsonl")[0]] == [{"text": read}]


PARTS = [f"Document {i} of {i * i}.\n\n" * 40 for i in range(3)]


@pytest.mark.parametrize("compression", [c for c in COMPRESS if c])
@pytest.mark.parametrize("padding", [b"", bytes(8)], ids=["", "padded"])
def test_compressed_files_of_several_streams_are_read_whole_or_not_at_all(tmp_path, compression, padding):
    """A truncated or extended file gives all its text, or raises an error of one line."""
    path = tmp_path / f"a.txt{compression}"
    streams = [COMPRESS[compression](part.encode()) + padding for part in PARTS]
    whole = b"".join(streams)
    path.write_bytes(whole)
    expected = [[line] for line in "".join(PARTS).split("\n\n") if line]
    assert lines_of(path) == expected
    ends = {len(streams[0]): 40, len(streams[0]) + len(streams[1]): 80}  # nothing shows that text is missing
    ends = {end - zeros: documents for end, documents in ends.items() for zeros in range(len(padding) + 1)}
    for cut in range(len(whole) - len(padding)):
        path.write_bytes(whole[:cut])
        if cut in ends:
            assert lines_of(path) == expected[: ends[cut]]
        else:
            with pytest.raises(UserError, match=rf"a.txt{compression}: cut off after line \d+; download"):
                lines_of(path)
    for more in (b"garbage", b"\1", streams[0][:3] + b"x" * 40):
        path.write_bytes(whole + more)
        with pytest.raises(UserError, match=rf"a.txt{compression}: (damaged|cut off) after line 240"):
            lines_of(path)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("compression", COMPRESS)
def test_lines_do_not_depend_on_where_a_file_is_split(tmp_path, monkeypatch, compression, chunk):
    monkeypatch.setattr("bertjax.data.corpus.reading.CHUNK_BYTES", chunk)
    (tmp_path / f"a.txt{compression}").write_bytes(2 * COMPRESS[compression](TEXT.encode() + b"\n"))
    documents = list(read_documents([f"{tmp_path}/a.txt{compression}"]))
    assert [d.lines for d in documents] == 2 * LINES
    assert [d.source.rpartition(":")[2] for d in documents] == ["1", "5", "7", "11"]


@pytest.mark.parametrize("name, content, message", [
    ("a.txt", "short\n\n" + "no end " * 1000, "a.txt:3: a line of more than 1,000 bytes"),
    ("a.txt", "short\n\n" + "no blank line\n" * 10, "a.txt:3: a document of more than 100 characters, with config"),
    ("a.jsonl", json.dumps({"text": "x" * 101}), "a.jsonl:1: a document of more than 100 characters"),
])  # fmt: skip
def test_a_line_or_document_without_end_is_refused(tmp_path, monkeypatch, name, content, message):
    limits = dict(MAX_LINE_BYTES=1000, CHUNK_BYTES=100, MAX_DOCUMENT_CHARACTERS=100)
    for limit, value in limits.items():
        monkeypatch.setattr(f"bertjax.data.corpus.reading.{limit}", value)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        lines_of(tmp_path / name)


def test_missing_files_and_empty_folders_are_named(tmp_path):
    for source in (tmp_path / "none.txt", tmp_path / "*.txt", tmp_path):
        with pytest.raises(UserError, match=r"data.corpus(: no text files| = .*: no such file)"):
            lines_of(source)
    with pytest.raises(UserError, match=r"TensorFlow Datasets cannot load 'no_such_set_of_text'"):
        list(read_documents(["tfds:no_such_set_of_text"]))


def test_a_tensorflow_dataset_is_read():
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=3):
        documents = list(read_documents(["tfds:wikipedia/20230601.en"]))
        with pytest.raises(
            UserError, match=r"text_column = 'text': 'mnist' has no such feature; choose one of image, label"
        ):
            lines_of("tfds:mnist")
        with pytest.raises(UserError, match=r"text_column = 'label': the feature of 'mnist' is not text"):
            lines_of("tfds:mnist", text_column="label")
    assert [d.source for d in documents] == [f"tfds:wikipedia/20230601.en example {i}" for i in range(3)]
    assert all(line.strip() for d in documents for line in d.lines)


def test_sentences_are_split_or_left_as_lines_and_an_endless_sentence_is_a_fault():
    document = Document("x", ["Dr. Smith came at 3.15 p.m. today. He left.", "No stop"])
    assert sentences.split(document) == ["Dr. Smith came at 3.15 p.m. today.", "He left.", "No stop"]
    assert sentences.split(document, split_lines=False) == document.lines
    many = Document("many.txt:1", ["A short one. " * 10_000])
    assert not sentences.find_fault(many, "en", True) and sentences.find_fault(many, "en", False)


@pytest.mark.parametrize("document, expected, begin", [
    ("blank_line", [["a", "b"], ["c"], ["d", "e"]], [2, 6, 9]),
    ("file", [["a", "b", "c", "d", "e"]], [2]),
    ("line", [["a"], ["b"], ["c"], ["d"], ["e"]], [2, 3, 6, 9, 10]),
])  # fmt: skip
def test_the_config_decides_where_documents_of_a_text_file_end(tmp_path, document, expected, begin):
    (tmp_path / "a.txt").write_text("\na\nb\n\n  \nc\n\n\nd\ne")
    (tmp_path / "b.txt").write_text("of its own\n")
    documents = list(read_documents([str(tmp_path)], ReadOptions(document=document)))
    assert [d.lines for d in documents] == [*expected, ["of its own"]]
    assert [d.source for d in documents] == [*(f"{tmp_path}/a.txt:{line}" for line in begin), f"{tmp_path}/b.txt:1"]


def test_invalid_documents_are_skipped_and_valid_documents_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("bertjax.data.corpus.reading.MAX_DOCUMENT_CHARACTERS", 100)
    monkeypatch.setattr("bertjax.data.corpus.reading.MAX_LINE_BYTES", 1000)
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\n\xff\xff\nstill two\n\nthree\n\n" + b"long line\n" * 50 + b"\nfour")
    (tmp_path / "b.txt").write_bytes(b"x" * 5000 + b"\n\nfive\n\n" + b"y" * 5000)
    rows = ['{"text": "six"}', '{"text": null}', '{"text": ["a"]}', "{", '{"body": "b"}', "[]", '{"text": "seven"}']
    (tmp_path / "c.jsonl").write_text("\n".join([*rows, json.dumps({"text": "z" * 101})]))
    faults = []

    class Collecting(ReadOptions):
        def on_bad(self, fault, remedy=""):
            faults.append(fault)

    documents = read_documents([str(tmp_path)], Collecting())
    assert [d.lines for d in documents] == [["one"], ["three"], ["four"], ["five"], ["six"], ["seven"]]
    assert [fault.partition(": ")[0].rpartition("/")[2] for fault in faults] == [
        "a.txt:4", "a.txt:9", "b.txt:1", "b.txt:5", *(f"c.jsonl:{i}" for i in (2, 3, 4, 5, 6, 8))
    ]  # fmt: skip
    assert "is null, not a string" in faults[4] and "is list" in faults[5] and "among body" in faults[7]


@pytest.mark.slow
def test_pydoc_and_docstrings_give_an_english_corpus(monkeypatch):
    """The documents are the topics of pydoc and docstrings of the standard library."""
    monkeypatch.setattr(python_docs, "MAX_CHARACTERS_PER_PACKAGE", 100_000)
    monkeypatch.setattr(python_docs, "MAX_CHARACTERS", 150_000)
    documents = python_docs.read_python_docs.__wrapped__()
    assert sum(len(line) for d in documents for line in d.lines) > 200_000
    from_topics = [d.source.startswith("pydoc ") for d in documents]
    assert 10 < sum(from_topics) < len(documents) - 10 and from_topics != sorted(from_topics)
    assert documents == python_docs.read_python_docs.__wrapped__()


# Portions of a corpus.


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)


@pytest.mark.slow
def test_portions_group_files_by_size_and_give_the_whole_corpus(tmp_path, monkeypatch):
    documents = tuple(Document(f"{i}", [f"document {i}"]) for i in range(3))
    monkeypatch.setattr(python_docs, "read_python_docs", lambda: documents)
    monkeypatch.setattr(corpus, "PORTION_BYTES", 100)
    monkeypatch.setattr(corpus, "FILE_BYTES", 20)
    write(tmp_path, a="a" * 60, b="b" * 60, c="c" * 500, d="d", e="e", f="f", g="g", h="h", i="i")
    sources = [str(tmp_path), "pydoc", f"{tmp_path}/c.txt"]
    parts = corpus_portions(sources)
    names = ["".join(os.path.basename(path)[0] for path in part.files) for part in parts]
    assert names == ["ab", "c", "defgh", "i", "", "c"]
    assert [(p.number, p.bytes) for p in parts] == list(enumerate([120, 500, 5, 1, 0, 500]))
    assert [p.source for p in parts] == [*4 * [sources[0]], *sources[1:]]
    assert parts == corpus_portions(sources)
    assert len({p.identity for p in parts}) == 5 and parts[1].identity == parts[5].identity  # c.txt twice
    read = [document for part in parts for document in read_portion(part)]
    assert read == list(read_documents(sources)) and len(read) == 10 + 3


def test_a_changed_corpus_has_another_identity(tmp_path):
    write(tmp_path, a="one", b="two")
    identities = [corpus_portions([str(tmp_path)])[0].identity]
    for change in (
        lambda: write(tmp_path, b="three"),
        lambda: (tmp_path / "b.txt").rename(tmp_path / "c.txt"),
        lambda: os.utime(tmp_path / "a.txt", ns=(0, 0)),
    ):
        change()
        identities.append(corpus_portions([str(tmp_path)])[0].identity)
    assert len(set(identities)) == 4 and corpus_portions([str(tmp_path)])[0].identity == identities[-1]


def test_a_file_that_changes_or_vanishes_is_named(tmp_path):
    write(tmp_path, a="one\n\nmore", b="two")
    (part,) = corpus_portions([str(tmp_path)])
    reading = read_portion(part)
    assert next(reading).lines == ["one"]
    write(tmp_path, a="one\n\nmore\n\nappended")
    for rest in (reading, read_portion(part)):
        with pytest.raises(UserError, match=r"a.txt: changed while the corpus was read"):
            list(rest)
    (part,) = corpus_portions([str(tmp_path)])
    (tmp_path / "b.txt").unlink()
    with pytest.raises(UserError, match=r"b.txt: cannot be read \(.*No such file"):
        list(read_portion(part))


def test_one_empty_file_among_many_is_accepted(tmp_path):
    write(tmp_path, a="", b="text", c=" \n\n")
    assert lines_of(tmp_path) == [["text"]]
    with pytest.raises(UserError, match=r"data.corpus: '.*c.txt' contains no text"):
        list(read_documents([f"{tmp_path}/b.txt", f"{tmp_path}/c.txt"]))


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


def test_object_stores_are_read_like_disks(remote):
    documents = list(read_documents([remote]))
    assert [d.lines for d in documents] == [["a"], ["b"], ["one"], ["two"]]
    assert [d.source for d in documents[1:3]] == [f"{remote}/b.txt:1", f"{remote}/sub/c.parquet:1"]
    assert list(read_documents([f"{remote}/"])) == list(read_documents([f"{remote}/**/*.*"])) == documents
    assert [f.path for f in list_files(f"{remote}/*.txt*").files] == [f"{remote}/a #%20.txt.gz", f"{remote}/b.txt"]
    assert [f.path for f in list_files(f"{remote}/b.txt").files] == [f"{remote}/b.txt"]


def test_missing_files_of_an_object_store_are_named(remote):
    for source, message in {
        "memory://none": "config.data.corpus = 'memory://none': no such file or folder",
        f"{remote}/none.txt": f"config.data.corpus = '{remote}/none.txt': no such file or folder",
        f"{remote}/*.jsonl": r"no text files in 'memory://store/\*.jsonl'",
        f"{remote}/sub/notes.md": "cannot read 'memory://store/sub/notes.md'; supported are",
        "nosuch://store/a.txt": "'nosuch://store/a.txt' cannot be listed",
    }.items():
        with pytest.raises(UserError, match=message):
            corpus_portions([source])
    (part,), store = corpus_portions([f"{remote}/*.txt"]), fsspec.filesystem("memory")
    store.pipe("/store/b.txt", b"longer")
    with pytest.raises(UserError, match=r"memory://store/b.txt: changed while"):
        list(read_portion(part))
    store.rm("/store/b.txt")
    with pytest.raises(UserError, match=r"memory://store/b.txt: cannot be read \(no such file"):
        list(read_portion(part))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A data set of the library `datasets`, in a folder."""
    folder = tmp_path_factory.mktemp("hub") / "set"
    folder.mkdir()
    rows = [{"text": f"line {i}.\nand another.", "body": f"body {i}", "n": i} for i in range(600)]
    rows[1]["text"], rows[2]["text"] = None, " \n"
    parquet.write_table(pyarrow.Table.from_pylist(rows[:400]), folder / "train-0.parquet", row_group_size=150)
    parquet.write_table(pyarrow.Table.from_pylist(rows[400:]), folder / "train-1.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows[:3]), folder / "test-0.parquet")
    return folder


def test_hugging_face_data_sets_are_streamed_in_file_order(hub):
    documents = list(read_documents([f"hf:{hub}"]))
    assert [d.lines[0] for d in documents] == [f"line {i}." for i in range(600) if i not in (1, 2)]
    assert documents[1].source == f"hf:{hub} example 4" and documents[1].lines == ["line 3.", "and another."]
    assert lines_of(f"hf:{hub}:test") == [["line 0.", "and another."]]
    assert lines_of(f"hf:{hub}:test:body") == [[f"body {i}"] for i in range(3)]
    assert len(lines_of(f"hf:{hub}::body")) == len(lines_of(f"hf:{hub}", text_column="body")) == 600


@pytest.mark.parametrize("rest, message", [
    (":validation", r"cannot be read after example 0 \(Bad split: validation. Available splits: .*train"),
    (":test:title", r"COLUMN = 'title': 'hf:.*' has no such column; columns with text: text, body$"),
    ("::n", r"COLUMN = 'n': 'hf:.*' has the type int64 in this column, not text"),
    ("", r"config.data.text_column = 'title': 'hf:.*' has no such column"),
    ("#other", r"data.corpus: 'hf:.*#other' cannot be loaded \(BuilderConfig 'other' not found"),
    ("-none", r"data.corpus: 'hf:.*-none' cannot be loaded \(Couldn't find any data file"),
    (":a:b:c", r"write hf:NAME\[#CONFIGURATION\]\[:SPLIT\[:COLUMN\]\]"),
])  # fmt: skip
def test_an_error_of_a_hugging_face_data_set_raises_one_line(hub, rest, message):
    with pytest.raises(UserError, match=message) as caught:
        lines_of(f"hf:{hub}{rest}", text_column="title")
    assert "\n" not in str(caught.value)


def test_a_hugging_face_data_set_that_changes_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one"}))
    (part,) = corpus_portions([f"hf:{tmp_path}"])
    assert part.files == () and [d.lines for d in read_portion(part)] == [["one"]]
    path.write_text(json.dumps({"text": "another"}))
    with pytest.raises(UserError, match=r"data.corpus: 'hf:.*' changed while the corpus was read"):
        list(read_portion(part))
    assert corpus_portions([f"hf:{tmp_path}"])[0].identity != part.identity


def test_the_datasets_library_is_an_optional_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"'hf:user/set' needs Hugging Face's library: pip install 'bertjax\[hf\]'"):
        corpus_portions(["hf:user/set"])


# Selection: held-out documents, repetitions of the other documents, and cleaning.


def test_held_out_documents_are_a_random_share_and_independent_of_other_documents():
    texts = [f"text {i}" for i in range(4000)]
    heldout = [text for text in texts if is_heldout(text, 0.1, seed=1)]
    assert 340 < len(heldout) < 460
    assert [text for text in texts if is_heldout(text, 0.1, seed=2)] != heldout
    assert not any(is_heldout(text, 0.0, seed=1) for text in texts)


def read(config, work=None):
    """Returns the lines of the selected documents, and the counts; with deduplication if there is a folder `work`."""
    counts, selection = collections.Counter(), selection_of(config)
    groups = corpus.groups([config.data.corpus])
    if work:
        (work / "hashes").mkdir()  # a file of a killed run
        (work / "hashes" / "documents-00000000.abc.partial").write_bytes(np.arange(2000, dtype=np.uint64).tobytes())
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            selection = preparation.with_repeats(selection, groups, str(work), pool, 2)
    return [s.document.lines for group in groups for s in selection.read(group, counts)], counts


def config_of(tmp_path, documents, **cleaning_rules):
    (tmp_path / "text.txt").write_text("\n\n".join("\n".join(lines) for lines in documents))
    config = tiny_config(tmp_path / "text.txt")
    config.data.cleaning.update(cleaning_rules)
    return config


def test_low_quality_documents_are_skipped_and_text_is_normalized(tmp_path):
    short, long, hindi, symbols = ["one"], ["one two", "three four"], ["नमस्ते दुनिया कैसे हो"], ["== | $$ a"]
    decomposed, composed = ["cafe\u0301", "caf\u00e9"], ["caf\u00e9", "caf\u00e9"]
    for rules, lines, expected, change in (
        (dict(min_words=4), [short, long, hindi, symbols], [long, hindi, symbols], "short_documents"),
        (dict(max_symbols=0.3), [short, long, hindi, symbols], [short, long, hindi], "documents_of_symbols"),
        (dict(nfc=True), [short, decomposed], [short, composed], "normalized_lines"),
    ):
        kept, counts = read(config_of(tmp_path, lines, **rules))
        assert (kept, counts[change]) == (expected, 1)


def test_duplicates_equal_a_brute_force_search(tmp_path, monkeypatch):
    """Deduplication in many pieces and ranges; a duplicate document does not make its lines boilerplate."""
    monkeypatch.setattr(cleaning, "HASHED_CHARACTERS", 200)
    monkeypatch.setattr(cleaning, "RANGE_BYTES", 1000)
    rng = random.Random(0)
    documents = [[f"line {rng.randrange(400)}" for _ in range(rng.randint(1, 6))] for _ in range(300)]
    documents += [["only here", f"and {i}"] for i in (1, 1, 1, 1, 2)] + documents[:50]
    rng.shuffle(documents)
    config = config_of(tmp_path, documents, duplicate_documents=True, max_line_documents=4)
    lines_kept, counts = read(config, tmp_path)

    unique = [lines for i, lines in enumerate(documents) if lines not in documents[:i]]
    having = collections.Counter(line for lines in unique for line in set(lines))
    kept = [[line for line in lines if having[line] <= 4] for lines in unique]
    assert lines_kept == [lines for lines in kept if lines]
    assert counts["duplicate_documents"] == len(documents) - len(unique) > 50
    assert counts["repeated_lines"] == sum(map(len, unique)) - sum(map(len, kept)) > 50
    assert ["only here", "and 1"] in lines_kept


def test_near_duplicates_are_detected_by_jaccard_similarity(tmp_path):
    """Copies with replaced words: the expected rates follow from the Jaccard similarity, over 300 pairs each."""
    rng, width = random.Random(0), cleaning.SHINGLE_WORDS

    def shingles(words):
        return {tuple(words[i : i + width]) for i in range(len(words) - width + 1)}

    for replaced in (1, 3, 10):
        documents, expected = [], 0.0
        for _ in range(300):
            words = [f"w{rng.randrange(10**6)}" for _ in range(100)]
            copy = list(words)
            for place in rng.sample(range(100), replaced):
                copy[place] = f"w{rng.randrange(10**6)}"
            documents += [[" ".join(words)], [" ".join(copy)]]
            shared = len(shingles(words) & shingles(copy)) / len(shingles(words) | shingles(copy))
            expected += 1 - (1 - shared**cleaning.BAND_HASHES) ** cleaning.BANDS
        kept, counts = read(config_of(tmp_path, documents, near_duplicates=True), tmp_path)
        assert abs(counts["near_duplicates"] - expected) < 4 * max(1, expected * (1 - expected / 300)) ** 0.5
        assert all(lines in kept for lines in documents[::2])
        (tmp_path / "repeats.npz").unlink()


def test_words_are_split_in_scripts_without_spaces(tmp_path):
    assert cleaning.words_of_line("The man, in 我们Hello 世界") == [
        "The",
        "man,",
        "in",
        "我",
        "们",
        "Hello",
        "世",
        "界",
    ]
    assert cleaning.words_of_line("สวัสดี") == ["ส", "วั", "ส", "ดี"] and cleaning.words_of_line("한국어 문장") == [
        "한국어",
        "문장",
    ]
    rng = random.Random(0)
    text = "".join(chr(0x4E00 + rng.randrange(3000)) for _ in range(3000))
    copy, other = text[:1500] + "新" + text[1501:], "".join(rng.sample(text, len(text)))
    first, second, third = cleaning.bands_of([[text], [copy], [other]])
    assert (first == second).sum() > 10 and not (first == third).any()
    config = config_of(tmp_path, [["我们在北京"], ["two words"], ["我们"]], min_words=3)
    assert read(config)[0] == [["我们在北京"]]


def test_the_manifest_stores_the_counts_of_cleaning(tmp_path, in_process, capsys):
    (tmp_path / "text.txt").write_text(make_corpus(60) + "\nhi\n\n" + make_corpus(60))
    config = tiny_config(tmp_path / "text.txt")
    config.data.cleaning.update(min_words=2, duplicate_documents=True)
    manifest = preparation.prepare(config, tmp_path / "out")
    assert manifest["cleaning"] == {"short_documents": 1, "duplicate_documents": 60}
    assert manifest["corpus"]["train_documents"] + manifest["corpus"]["heldout_documents"] == 60
    assert "60 documents left out: duplicates of earlier documents" in capsys.readouterr().out
    assert manifest["recipe"]["cleaning.min_words"] == 2


def test_mixtures_name_sources_and_weights():
    config = tiny_config()
    config.data.corpus = ["a.txt", "b=c.txt"]
    config.data.mixture = "b=c.txt=0.5"
    assert mixture_of(config) == {"a.txt": 1.0, "b=c.txt": 0.5}
    for mixture, message in (
        (
            "c.txt=2",
            r"config.data.mixture = 'c.txt=2': 'c.txt' is not a source of the text; choose from a.txt, b=c.txt",
        ),
        ("a.txt", "write SOURCE=WEIGHT"),
        ("a.txt=-1", "write SOURCE=WEIGHT"),
        ("a.txt=nan", "write SOURCE=WEIGHT"),
        ("a.txt=0,b=c.txt=0", "at least one weight must be above 0"),
    ):
        config.data.mixture = mixture
        with pytest.raises(UserError, match=message):
            mixture_of(config)
