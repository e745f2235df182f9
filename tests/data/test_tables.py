"""Tables: the features of TensorFlow Datasets for each task, with made-up examples. Tests of the tasks read files."""

import csv
import inspect
import io
import itertools

import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config
from bertjax.data.corpus.tables import cell, column, read_table, read_tfds
from bertjax.finetuning import conll, squad_files
from bertjax.inference import tasks
from bertjax.text.tokenizer import SPECIAL_TOKENS, WordPiece
from tests.conftest import TOPICS

MRPC = [
    dict(sentence1="the ship", sentence2="sail über", label=1, idx=0),
    dict(sentence1="a rose", sentence2="oven", label=0, idx=1),
]
STSB = [dict(sentence1="ship", sentence2="sail", label=3.8, idx=0)]
CONLL = [dict(tokens=["EU", "rejects", "Britain"], ner=[3, 0, 5], pos=[0, 0, 0], chunks=[0, 0, 0])]
SQUAD = [
    dict(id="q1", title="t", question="What sailed?", context="The ship sailed.")
    | dict(answers=dict(text=["ship", "The ship"], answer_start=[4, 0]))
]
SQUAD2 = [
    dict(id="q1", title="t", question="Who cooked?", context="The ship sailed.", is_impossible=True)
    | dict(answers=dict(text=[], answer_start=[]), plausible_answers=dict(text=["ship"], answer_start=[4]))
]


@pytest.fixture
def provide(tmp_path):
    """Returns a context in which every data set of the library has these examples in all splits."""
    tf, tfds = pytest.importorskip("tensorflow"), pytest.importorskip("tensorflow_datasets")

    def context(examples):
        def as_dataset(builder, split, **options):
            # The prepared data, or the functions that make it, define the names of the splits.
            made = inspect.getsource(type(builder)._split_generators)
            if not any(name in made for name in (f'"{split}"', f"'{split}'", f"Split.{split.upper()}")):
                raise ValueError(f"Unknown split {split!r}")

            def generate():
                for example in examples:
                    yield arrays(builder.info.features.get_tensor_spec(), example)

            return tf.data.Dataset.from_generator(generate, output_signature=builder.info.features.get_tensor_spec())

        def arrays(spec, value):
            if isinstance(spec, dict):
                return {name: arrays(part, value[name]) for name, part in spec.items()}
            if spec.dtype == tf.string:
                return np.array([x.encode() for x in value], object) if isinstance(value, list) else value.encode()
            return np.array(value, spec.dtype.as_numpy_dtype)

        return tfds.testing.mock_data(as_dataset_fn=as_dataset)

    return context


@pytest.fixture(scope="module")
def pieces():
    return WordPiece([*SPECIAL_TOKENS, *(word for words in TOPICS.values() for word in words)], lowercase=True)


@pytest.mark.slow
def test_class_labels_become_names_and_numbers_stay_numbers(provide):
    with provide(MRPC):
        rows = read_tfds("tfds:glue/mrpc", "train")
    assert rows[0].columns["sentence2"] == "sail über" and rows[1].where == "tfds:glue/mrpc, train 1"
    assert [column(row, "label") for row in rows] == ["equivalent", "not_equivalent"]
    with provide(STSB):
        assert float(column(read_tfds("tfds:glue/stsb", "train")[0], "label")) == pytest.approx(3.8)
    with pytest.raises(UserError, match=r"config.data.path: TensorFlow Datasets cannot load 'no_such_set', train"):
        read_tfds("tfds:no_such_set", "train")


def load(pieces, path, task, **fields):
    """Loads the data of a fine-tuning task."""
    config = fine_tuning_config(task, **fields)
    config.data.path = str(path)
    return tasks.get(config.task).load(config, pieces)


def test_glue_from_tfds_equals_glue_from_files(provide, pieces, tmp_path):
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    lines += [f"{row['label']}\t0\t0\t{row['sentence1']}\t{row['sentence2']}" for row in MRPC]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    from_files = load(pieces, tmp_path, "glue", name="mrpc")
    with provide(MRPC):
        from_tfds = load(pieces, "tfds:glue/mrpc", "glue", name="mrpc")
    with provide([dict(premise="the ship", hypothesis="sail", label=1, idx=0)]):
        dataset = load(pieces, "tfds:glue/mnli", "glue", name="ax")
    assert len(dataset.dev) == 2 and dataset.notes[0].startswith("no labelled diagnostics in tfds:glue/mnli")
    assert from_tfds.labels == from_files.labels
    np.testing.assert_array_equal(from_tfds.train.labels, from_files.train.labels)
    for one, other in zip(from_tfds.train.input_ids, from_files.train.input_ids, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sentences_and_questions_are_read_from_tfds(provide, pieces):
    with provide(CONLL):
        (sentence,) = conll.read_tfds_conll("tfds:conll2003", "train")
        dataset = load(pieces, "tfds:conll2003", "ner", document_context=True)
    assert sentence.words == ("EU", "rejects", "Britain") and sentence.tags == ("B-ORG", "O", "B-LOC")
    assert len(dataset.train) == 1 and dataset.labels == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
    assert dataset.notes[-1].startswith("no -DOCSTART- lines")
    questions = dict(doc_stride=128, max_query_length=64)
    with provide(SQUAD):
        (question,) = squad_files.read_tfds_squad("tfds:squad/v1.1", "train")
        assert len(load(pieces, "tfds:squad/v1.1", "squad", version="v1.1", **questions).train) == 1
    assert question.answers == ("ship", "The ship") and question.starts == (4, 0)
    with provide(SQUAD2):
        (question,) = squad_files.read_tfds_squad("tfds:squad/v2.0", "train")
        assert load(pieces, "tfds:squad/v2.0", "squad", version="v2.0", **questions).baseline == 1
    assert question.answers == () and question.name == "q1"
    message = r"tfds:squad/v1.1: 1 training questions have an answer .*: q1 \(in the first, 'ship'"
    with provide([{**SQUAD[0], "answers": dict(text=["ship"], answer_start=[3])}]):
        with pytest.raises(UserError, match=message):
            load(pieces, "tfds:squad/v1.1", "squad", version="v1.1", **questions)


def table(tmp_path, content, suffix, **how):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows, _ = read_table(path, **how)
    return [tuple(row.columns.values()) for row in rows], [int(row.where.rpartition(":")[2]) for row in rows]


def test_json_lines_keep_lists_and_numbers(tmp_path):
    content = '{"text": "a", "tags": ["x", "ü"], "n": 2.5}\n\n{"n": 1.0, "b": true, "text": null}\n{"n": 1}\n'
    (tmp_path / "a.jsonl").write_text(content)
    rows, _ = read_table(tmp_path / "a.jsonl")
    assert len(rows) == 3 and cell(rows[0], "tags") == ["x", "ü"] and column(rows[0], "n") == "2.5"
    assert column(rows[1], "n") == column(rows[-1], "n") == "1" and column(rows[1], "b") == "true"
    for row, name, message in (
        (rows[0], "tags", r"a.jsonl:1: tags is a list, expected text"),
        (rows[1], "text", r"a.jsonl:3: text is null"),
        (rows[1], "tags", r"a.jsonl:3: no column 'tags'; the columns are n, b, text"),
    ):
        with pytest.raises(UserError, match=message):
            column(row, name)


@pytest.mark.parametrize("content", [
    "text,label\na b,x\nc,y\n",
    b"\xef\xbb\xbftext , label\r\na b,x\r\nc,y\r\n",
    "text,label\ra b,x\rc,y",
    ",,,\ntext,label,,\na b,x,,\n,,,\nc,y\n , ,,\n",
    "text,label\na b,x,,\nc,y,\n",
    ",text,label\n0,a b,x\n1,c,y\n",
    'text, label\n"a b", "x"\nc, y\n',
])  # fmt: skip
def test_tables_of_spreadsheets_are_read(tmp_path, content):
    expected = [("a b", "x"), ("c", "y")]
    assert table(tmp_path, content, "csv")[0] == expected
    if '"' not in str(content):
        separated = content.replace(b",", b"\t") if isinstance(content, bytes) else content.replace(",", "\t")
        rows = table(tmp_path, separated, "tsv")[0]
        assert [tuple(cell.strip() for cell in row) for row in rows] == expected


@pytest.mark.parametrize("content, suffix, message", [
    ("text;label\na, b;x\n", "csv", r"a.csv:1: one column, 'text;label': .* by semicolons, not by commas"),
    ("text\tlabel\na\tx\n", "csv", r"a.csv:1: .* separated by tabs, not by commas; save the file with commas"),
    ("text,label\na,x\n", "tsv", r"a.tsv:1: .* separated by commas, not by tabs"),
    ("text,label,label \na,x,y\n", "csv", r"a.csv:1: two columns have the name 'label'"),
    ("text,label,,\na,b,x,\n", "csv", r"a.csv:2: 3 columns, expected 2: text, label"),
    ("text,label\na\n", "csv", r"a.csv:2: 1 columns, expected 2"),
    ('text,label\n"a,x\n', "csv", r"a.csv:2: not CSV"),
])  # fmt: skip
def test_invalid_tables_are_named_with_file_and_line(tmp_path, content, suffix, message):
    with pytest.raises(UserError, match=message):
        table(tmp_path, content, suffix)


TEXTS = ['said "yes"', "a\tb", "two\nlines", 'x "y"\tz\n\nw', "it's", '5" nail', '"', "plain", "a, b"]


def test_a_tsv_with_the_quoting_of_pandas_is_read(tmp_path):
    def quoted(rows, **how):
        file = io.StringIO(newline="")
        csv.writer(file, delimiter="\t", **how).writerows(rows)
        return table(tmp_path, file.getvalue(), "tsv")

    for texts in (TEXTS, TEXTS[:1], TEXTS[1:2], TEXTS[2:3], TEXTS[4:6]):
        for newline, order in itertools.product(("\n", "\r\n"), (1, -1)):
            rows = [("text", "label")[::order], *((text, "x")[::order] for text in texts)]
            assert quoted(rows, lineterminator=newline)[0] == rows[1:]
    assert quoted([("text", "label"), ("a", "x")], quoting=csv.QUOTE_ALL) == ([("a", "x")], [2])


@pytest.mark.parametrize("lines", [
    ['"Great" film\tx', "it's\ty"],
    ['"Hello there\tx', "nice\ty", 'bye"\tx'],  # whole rows lie between two quotation marks
    ['x\t"Hello', "y\tnice", 'x\tbye"'],
    ['1\t"\tO', "1\tship\tO", '1\t"\tO'],
    ['"Great film"\tx'],
    ['"never closed\tx', "nice\ty"],
])  # fmt: skip
def test_quotation_marks_of_an_unquoted_tsv_are_text(tmp_path, lines):
    header = "\t".join("abc"[: lines[0].count("\t") + 1])
    expected = [tuple(line.split("\t")) for line in lines]
    assert table(tmp_path, "\n".join([header, *lines]), "tsv") == (expected, list(range(2, len(lines) + 2)))


def test_an_unclosed_quote_does_not_swallow_rows(tmp_path):
    """With either reading of the quotation marks, one line is malformed: an error is raised instead of losing rows."""
    for lines, place in (
        (['"Hello there\tx', "nice\ty", 'bye"\tx', "broken"], 5),
        (['"two\nlines"\tx', '"open\tx', "nice\ty"], 4),
        (['"two\nlines"\tx', '"Hello there\tx', "nice\ty", 'bye"\tx'], 4),
    ):
        with pytest.raises(UserError, match=rf"a.tsv:{place}: "):
            table(tmp_path, "\n".join(["a\tb", *lines]) + "\n", "tsv")
    lines = ["a\tb", '"say ""a"""\tx', '"Hello\tx', "nice\ty", 'bye"\tx']
    assert table(tmp_path, "\n".join(lines), "tsv")[1] == [2, 3, 4, 5]
    assert table(tmp_path, '"a\tb\nx\ty\n', "tsv")[0] == [("x", "y")]
    assert table(tmp_path, 'a\tb\n"x ""y"""\tz\n', "tsv", quoting=False)[0] == [('"x ""y"""', "z")]
