"""One file as training and dev data: the choice of held-out examples, and equal choices in every command."""

import dataclasses
import json

import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.data.corpus import fingerprints, holdout
from bertjax.inference import tasks
from bertjax.interop.pretrained import Pretrained
from experiments import classify, embed, tag
from tests.finetuning.test_finetuning import tokenizer

STARS = ["1"] * 60 + ["2"] * 30 + ["3"] * 9 + ["rare"]


def test_a_tenth_of_every_label_is_held_out_deterministically():
    chosen = holdout.choose_heldout([[label] for label in STARS], seed=0)
    assert sorted(chosen) == [2, 4, 5, 16, 23, 48, 62, 63, 89, 93]  # must never change: workdirs rely on it
    assert chosen != holdout.choose_heldout([[label] for label in STARS], seed=1)
    several = [["1", "2"], ["1"], [], ["2", "rare"]] * 40
    chosen = holdout.choose_heldout(several, seed=0)
    assert [sum(number % 4 == kind for number in chosen) for kind in range(4)] == [4, 4, 4, 4]


def test_the_last_example_of_a_label_stays_in_training():
    for seed in range(20):
        chosen = holdout.choose_heldout([[str(number // 2)] for number in range(200)], seed, stratified=False)
        assert 15 <= len(chosen) <= 20
        assert {number // 2 for number in set(range(200)) - chosen} == set(range(100))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(experiment, path, **data):
    config = experiment.get_config()
    config.data.path, config.max_seq_length = str(path), 16
    config.data.update(data)
    return config


def stored(config, rows):
    """Writes the checkpoint of a run with a config, whose head has `rows` outputs."""
    params = {"classifier": {"dense": {"bias": np.zeros(rows)}}}
    known = {config.data.path: fingerprints.of_file(config.data.path)}
    model, task = BertConfig(max_position_embeddings=16), tasks.get(config.task)
    return Pretrained("x", "bertjax", model, params, tokenizer(), [], task.architecture, settings=config,
                      fingerprints=known)  # fmt: skip


@pytest.mark.parametrize("label, values, counts, named", [
    ("stars", STARS, (90, 10), "1 of 10 rows held out as dev, stratified by stars (data.heldout_seed=0): 90 for"),
    ("score", range(100), (90, 10), "1 of 10 rows held out as dev (data.heldout_seed=0): 90 for training, 10 held"),
])  # fmt: skip
def test_a_run_and_evaluate_hold_out_the_same_rows(tmp_path, label, values, counts, named):
    path = write(tmp_path / "reviews.jsonl", [{"text": "ship", label: value} for value in values])
    config = config_of(classify, path, label=label, is_number=label == "score")
    dataset, task = tasks.get("classify").load(config, tokenizer()), tasks.get("classify")
    assert (len(dataset.train), len(dataset.dev[0].examples)) == counts
    assert dataset.notes[0].startswith(f"{path}: {named}")
    source = dataclasses.replace(stored(config, len(dataset.labels) or 1), labels=dataset.labels)
    copied = write(tmp_path / "copy.jsonl", [{"text": "ship", label: value} for value in values])
    split = task.read_labelled(source, str(copied))
    assert split.note.startswith(f"{dataset.notes[0]}\nlabelled: 10 examples found = 10 used, 0 skipped")
    np.testing.assert_array_equal(split.examples.labels, dataset.dev[0].examples.labels)
    write(copied, [{"text": "sail", label: value} for value in values])
    other = task.read_labelled(source, str(copied))
    assert len(other.examples) == 100 and other.note.startswith("labelled: 100 examples found = 100 used")


def test_sentences_and_queries_are_held_out(tmp_path):
    path = write(tmp_path / "tagged.jsonl", [{"words": ["ship", f"a{i}"], "tags": ["X", "Y"]} for i in range(40)])
    config = config_of(tag, path)
    dataset = tasks.get("tag").load(config, tokenizer())
    assert len(dataset.train) == 36 and "1 of 10 sentences held out" in dataset.notes[0]
    split = tasks.get("tag").read_labelled(dataclasses.replace(stored(config, 2), labels=dataset.labels), str(path))
    assert len(split.examples) == 4
    assert split.note.startswith(f"{dataset.notes[0]}\nlabelled: 4 sentences found = 4 used, 0 skipped")

    words = [piece for piece in tokenizer().pieces if piece.isalpha()][:20]
    pairs = [{"anchor": words[i % 20], "positive": f"{words[i % 20]} {words[i % 7]}"} for i in range(80)]
    config = config_of(embed, write(tmp_path / "pairs.jsonl", pairs))
    dataset = tasks.get("embed").load(config, tokenizer())
    held_out = r"1 of 10 queries held out as dev (data.heldout_seed=0): 18 for training, 2 held out, with 72 and 8 ex"
    assert held_out in dataset.notes[0]
    anchors = {tuple(ids) for ids in dataset.train.input_ids[::2]}
    dev = {tuple(ids) for ids in dataset.dev[0].examples.input_ids}
    assert len(anchors) == 18 and not anchors & dev
    split = tasks.get("embed").read_labelled(stored(config, 2), config.data.path)
    assert {tuple(ids) for ids in split.examples.input_ids} == dev
    assert split.note.startswith(f"{dataset.notes[0]}\n")


@pytest.mark.parametrize("experiment, rows, data, message", [
    (classify, [{"text": "ship", "label": i % 2} for i in range(5)], {}, "5 rows are too few to hold out 1 of 10 as"),
    (classify, [{"text": "ship", "label": i} for i in range(20)], {"is_number": True}, "20 rows are too few"),
    (classify, [{"text": "ship", "label": 1} for _ in range(20)], {}, "config.data.label = 'label': all training lab"),
    (embed, [{"anchor": "ship", "positive": "sail"} for _ in range(40)], {}, "1 queries are too few"),
    (embed, [{"anchor": f"a{i}", "positive": "b", "label": int(i == 0)} for i in range(20)], {"form": "labelled"},
     "all 2 held-out examples have label = 0, which allow no evaluation; name a dev set with config.data.dev.path"),
])  # fmt: skip
def test_a_file_that_cannot_be_divided_is_refused(tmp_path, experiment, rows, data, message):
    config = config_of(experiment, write(tmp_path / "rows.jsonl", rows), **data)
    with pytest.raises(UserError, match=message):
        tasks.get(config.task).load(config, tokenizer())


def test_a_file_of_another_type_is_refused(tmp_path):
    (tmp_path / "rows.txt").write_text("ship\n")
    with pytest.raises(UserError, match=r"rows.txt': must be a folder, or a file that ends in .csv, .tsv, .jsonl"):
        tasks.get("classify").load(config_of(classify, tmp_path / "rows.txt"), tokenizer())
