"""Tables: TensorFlow Datasets' own features of each task, with made-up examples; files are tested with the tasks."""

import inspect
import json

import numpy as np
import pytest

from bertjax import tasks
from bertjax.config import UserError, fine_tuning_config
from bertjax.data.tables import column, read_table, read_tfds
from bertjax.tasks import ner, squad
from bertjax.text.tokenizer import SPECIAL_PIECES, WordPiece
from tests.conftest import TOPICS

MRPC = [
    dict(sentence1="the ship", sentence2="sail über", label=1, idx=0),
    dict(sentence1="a rose", sentence2="oven", label=0, idx=1),
]
STSB = [dict(sentence1="ship", sentence2="sail", label=3.8, idx=0)]
CONLL = [dict(tokens=["EU", "rejects", "Britain"], ner=[3, 0, 5], pos=[0, 0, 0], chunks=[0, 0, 0])]
SQUAD = [
    dict(id="q1", title="t", question="What sailed?", context="The ship sailed.")
    | dict(answers=dict(text=["ship", "The ship"], answer_start=[4, 0])),
]
SQUAD2 = [
    dict(id="q1", title="t", question="Who cooked?", context="The ship sailed.", is_impossible=True)
    | dict(answers=dict(text=[], answer_start=[]), plausible_answers=dict(text=["ship"], answer_start=[4])),
]


@pytest.fixture
def provide(tmp_path):
    """A context in which every data set of the library has these examples in each of its splits."""
    tf, tfds = pytest.importorskip("tensorflow"), pytest.importorskip("tensorflow_datasets")

    def context(examples):
        def as_dataset(builder, split, **options):
            # The names of the splits are known once the data is there, or from what makes them.
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
    return WordPiece([*SPECIAL_PIECES, *(word for words in TOPICS.values() for word in words)], lowercase=True)


def test_classes_have_their_names_and_numbers_are_numbers(provide):
    with provide(MRPC):
        rows = read_tfds("tfds:glue/mrpc", "train")
    assert rows[0].columns["sentence2"] == "sail über" and rows[1].where == "tfds:glue/mrpc, train 1"
    assert [column(row, "label") for row in rows] == ["equivalent", "not_equivalent"]
    with provide(STSB):
        assert float(column(read_tfds("tfds:glue/stsb", "train")[0], "label")) == pytest.approx(3.8)


def test_a_task_of_glue_from_tfds_is_that_of_its_files(provide, pieces, tmp_path):
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    lines += [f"{row['label']}\t0\t0\t{row['sentence1']}\t{row['sentence2']}" for row in MRPC]
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    config = fine_tuning_config("glue", name="mrpc")
    config.data.path = str(tmp_path)
    from_files = tasks.get(config.task).load(config, pieces)
    config.data.path = "tfds:glue/mrpc"
    with provide(MRPC):
        from_tfds = tasks.get(config.task).load(config, pieces)
    config = fine_tuning_config("glue", name="ax")
    config.data.path = "tfds:glue/mnli"
    with provide([dict(premise="the ship", hypothesis="sail", label=1, idx=0)]):
        dataset = tasks.get(config.task).load(config, pieces)
    assert len(dataset.dev) == 2 and dataset.notes[0].startswith("no labelled diagnostics in tfds:glue/mnli")
    assert from_tfds.labels == from_files.labels
    np.testing.assert_array_equal(from_tfds.train.labels, from_files.train.labels)
    for one, other in zip(from_tfds.train.input_ids, from_files.train.input_ids, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sentences_and_questions(provide, pieces):
    with provide(CONLL):
        (sentence,) = ner.read_examples("tfds:conll2003", "train")
        config = fine_tuning_config("ner", document_context=True)
        config.data.path = "tfds:conll2003"
        dataset = tasks.get(config.task).load(config, pieces)
        assert len(dataset.train) == 1 and dataset.labels == ("O", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
        assert dataset.notes[-1].startswith("no -DOCSTART- lines")
    assert sentence.words == ("EU", "rejects", "Britain") and sentence.tags == ("B-ORG", "O", "B-LOC")
    with provide(SQUAD):
        (question,) = squad.read_examples("tfds:squad/v1.1", "train")
        config = fine_tuning_config("squad", version="v1.1", doc_stride=128, max_query_length=64)
        config.data.path = "tfds:squad/v1.1"
        assert len(tasks.get(config.task).load(config, pieces).train) == 1
    assert question.answers == ("ship", "The ship") and question.starts == (4, 0)
    with provide(SQUAD2):
        (question,) = squad.read_examples("tfds:squad/v2.0", "train")
        config = fine_tuning_config("squad", version="v2.0", doc_stride=128, max_query_length=64)
        config.data.path = "tfds:squad/v2.0"
        assert tasks.get(config.task).load(config, pieces).baseline == 1
    assert question.answers == () and question.name == "q1"
    shifted = [{**SQUAD[0], "answers": dict(text=["ship"], answer_start=[3])}]
    with (
        provide(shifted),
        pytest.raises(UserError, match=r"tfds:squad/v1.1, train: question q1: its answer 'ship'"),
    ):
        squad.read_examples("tfds:squad/v1.1", "train")


def test_what_the_library_does_not_have():
    with pytest.raises(UserError, match=r"config.data.path: TensorFlow Datasets cannot load 'no_such_set', train"):
        read_tfds("tfds:no_such_set", "train")


def test_json_lines_keep_what_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "tags": ["x", "ü"], "n": 2.5}\n')
    (row,), _ = read_table(tmp_path / "a.jsonl")
    assert row.columns["text"] == "a" and json.loads(row.columns["tags"]) == ["x", "ü"] and row.columns["n"] == "2.5"
