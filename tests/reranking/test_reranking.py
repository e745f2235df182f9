"""The task `rerank`: training, invariance to devices, microbatches and packing, evaluation, ranking, run files."""

import dataclasses
import functools
import itertools
import json
import random
import re
import shutil

import jax
import numpy as np
import pytest

from bertjax.cli.next_commands import uses_of
from bertjax.common import progress
from bertjax.common.errors import UserError
from bertjax.data.batch import Batch
from bertjax.distributed.mesh import make_mesh, put_batch
from bertjax.embedding.index import Hit
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning import sweep
from bertjax.finetuning.task import FineTuning
from bertjax.interop import conversion, pretrained
from bertjax.launch.validate import validate
from bertjax.library import checkpoints, load
from bertjax.reranking import forms, run_files, sets, trec
from bertjax.reranking.evaluator import RankedLists
from bertjax.reranking.ranking import Ranker, is_reranker
from bertjax.training.checkpoints import checkpoint as stored
from bertjax.training.optim.schedules import make_schedule
from bertjax.training.step import Program, put_hyperparameters
from bertjax.training.trackers.jsonl import read_metrics
from experiments import rerank
from tests.conftest import TOPICS, launch_and_stop
from tests.embedding.test_retrieval import sentence, write_beir
from tests.finetuning.test_classify import write_table
from tests.finetuning.test_finetuning import run
from tests.processes import run as command

TOPIC_NAMES = sorted(TOPICS)
RELEVANT = TOPIC_NAMES[3]  # the topic of relevant documents: the test model is too small to compare two texts


def lists_of(count: int, seed: int) -> list[dict]:
    """Queries with two to five documents, of which the document about the sea has the grade 2."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        topics = [RELEVANT, *rng.choices([name for name in TOPIC_NAMES if name != RELEVANT], k=rng.randint(1, 4))]
        documents = [sentence(rng, topic) for topic in topics]
        query = sentence(rng, rng.choice(TOPIC_NAMES))
        rows.append({"query": query, "documents": documents, "grades": [2, *[0] * (len(topics) - 1)]})
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Lists as JSON lines; a BEIR folder with a run file."""
    path = tmp_path_factory.mktemp("lists")
    for name, count in (("train", 120), ("dev", 30)):
        write_table(path / f"{name}.jsonl", lists_of(count, count))
    rng = random.Random(2)
    corpus = [{"_id": f"d{i:02}", "text": sentence(rng, TOPIC_NAMES[i % 4])} for i in range(24)]
    queries = [{"_id": f"q{i}", "text": sentence(rng, TOPIC_NAMES[i % 4])} for i in range(8)]
    qrels = [(f"q{i}", f"d{j:02}", 1) for i in range(8) for j in (3, 7)]
    write_beir(path / "beir", corpus, queries, test=qrels, train=qrels)
    # The candidates of a query lack one relevant document; the other is the last candidate.
    ranking = {f"q{i}": [(f"d{j:02}", 1.0 / (1 + n)) for n, j in enumerate((0, 5, 10, 3))] for i in range(8)}
    (path / "run.trec").write_text("".join(trec.run_lines(ranking)))
    return path


def config_for(folder, checkpoint, **fields):
    config = rerank.get_config()
    config.data.update(path=str(folder), form="lists", texts="query,documents", label="grades")
    config.init_checkpoint = str(checkpoint)
    config.update(dict(batch_size=8, max_seq_length=48, log_every_steps=1, dtype="float32"))
    config.loss.name = "list_net"
    config.update_from_flattened_dict(fields)
    return config


@pytest.fixture(scope="module")
def trained(folder, checkpoint, tmp_path_factory):
    """The workdir of a finished run."""
    workdir = tmp_path_factory.mktemp("rerank") / "run"
    config = config_for(folder, checkpoint, epochs=4.0, **{"optimizer.learning_rate": 3e-3})
    validate(config)
    run(config, workdir)
    return workdir


# Training.


def test_training_improves_the_ranking_and_ranks_runs_by_ndcg(trained, folder):
    scores = pretrained.read_pretrained(trained).scores
    assert scores.keys() == {"ndcg@10", "mrr@10", "map"} and scores["ndcg@10"] > 0.9
    assert (trained / "dev_samples.json").exists()
    assert stored.read_scores(trained, 60).score == pytest.approx(scores["ndcg@10"])
    report = checkpoints.evaluate(trained, folder / "dev.jsonl")
    assert report.scores == pytest.approx(scores, abs=1e-6)


def test_a_long_evaluation_prints_its_progress(trained, folder, monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_EARLY", 0)
    checkpoints.evaluate(trained, folder / "dev.jsonl")
    assert re.search(r"^evaluating: (\d+) examples of \1 examples", capsys.readouterr().out, re.MULTILINE)


def step_of(config, tmp_path, data=1, fsdp=1, microbatches=1) -> tuple[dict, dict, Batch]:
    """Returns the change of the params by one step of SGD, the metrics, and the batch."""
    config.mesh.update(data=data, fsdp=fsdp, tensor=1)
    config.microbatches = microbatches
    config.optimizer.update(name="sgd", warmup_proportion=0.0, learning_rate=1.0, weight_decay=0.0, max_grad_norm=1e9)
    config, _ = finetuning_run.resolve(config, None)
    inputs = finetuning_run.load_inputs(config, tmp_path, None)
    task = FineTuning(config, make_mesh(config, jax.devices()[: data * fsdp]), inputs.data)
    program = Program(task, config, task.mesh)
    hyperparameters = put_hyperparameters(0, make_schedule(config.optimizer, 1000), task.mesh)
    state = program.init(jax.random.key(0))
    before = jax.device_get(state.params)
    batch = next(itertools.islice(task.batches(0), 1, 2))
    state, metrics = program.train_step(state, put_batch(batch, task.mesh), hyperparameters)
    return jax.tree.map(np.subtract, before, jax.device_get(state.params)), jax.device_get(metrics), batch


def assert_same_step(actual, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), actual[0], expected[0])
    for name in ("loss", "accuracy", "grad_norm"):
        np.testing.assert_allclose(actual[1][name], expected[1][name], rtol=2e-4, err_msg=name)


@pytest.mark.parametrize("loss", ["list_net", pytest.param("multiple_negatives", marks=pytest.mark.slow),
                                  pytest.param("binary_cross_entropy", marks=pytest.mark.slow)])  # fmt: skip
@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_eight_devices_and_microbatches_change_no_step(loss, packing, folder, checkpoint, tmp_path):
    fields = {"loss.name": loss, "packing": packing}
    if loss == "binary_cross_entropy":
        fields |= {"data.form": "rerank", "data.label": ""}
        rows = [
            {"query": row["query"], "positive": row["documents"][:1], "negative": row["documents"][1:]}
            for row in lists_of(40, 3)
        ]
        for name in ("train", "dev"):
            write_table(tmp_path / f"{name}.jsonl", rows)
        folder = tmp_path
    expected = step_of(config_for(folder, checkpoint, **fields), tmp_path)
    assert expected[1]["loss"] > 0.1 and expected[1]["grad_norm"] > 0.01
    assert_same_step(step_of(config_for(folder, checkpoint, **fields), tmp_path, 4, 2, 1), expected)
    assert_same_step(step_of(config_for(folder, checkpoint, **fields), tmp_path, 2, 1, 2), expected)


@pytest.mark.slow
@pytest.mark.parametrize("windows", ["", "max", "mean"])
def test_packing_changes_no_step(windows, folder, checkpoint, tmp_path):
    """All lists are in one batch, without dropout."""
    fields = {"batch_size": 120, "data.windows": windows, "data.doc_stride": 2, "max_seq_length": 10}
    fields |= {f"model.{name}_dropout_prob": 0.0 for name in ("hidden", "attention_probs")} | {"epochs": 2.0}
    padded, packed = (
        step_of(config_for(folder, checkpoint, packing=packing, **fields), tmp_path) for packing in (False, True)
    )
    assert_same_step(packed, padded)
    if windows:
        assert padded[2]["weights"].sum() > sum(len(row["documents"]) for row in lists_of(120, 120))


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_for_bit(folder, checkpoint, tmp_path):
    fields = {"epochs": 1.0, "checkpoint.every_steps": 4, "loss.name": "multiple_negatives"}
    run(config_for(folder, checkpoint, **fields), tmp_path / "whole")
    launch_and_stop(FineTuning, config_for(folder, checkpoint, **fields), tmp_path / "stopped", 9)
    run(config_for(folder, checkpoint, **fields), tmp_path / "stopped")
    whole, resumed = (pretrained.read_pretrained(tmp_path / name) for name in ("whole", "stopped"))
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    assert whole.scores == resumed.scores


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", ["mse", "margin_mse", "kl", "lambda", "rank_net", "list_mle", "position_aware_list_mle"]
)
def test_a_student_learns_the_ranking_of_a_teacher(loss, trained, folder, checkpoint, tmp_path):
    fields = {"loss.name": loss, "distill.teacher": str(trained), "epochs": 4.0, "optimizer.learning_rate": 3e-3}
    run(config_for(folder, checkpoint, **fields), tmp_path / "run")
    assert pretrained.read_pretrained(tmp_path / "run").scores["ndcg@10"] > 0.85
    teacher, student = (Ranker(pretrained.read_with_tokenizer(path)) for path in (trained, tmp_path / "run"))
    pairs = [(row["query"], document) for row in lists_of(30, 30) for document in row["documents"]]
    assert np.corrcoef(teacher.logits(pairs), student.logits(pairs))[0, 1] > 0.6


# Use.


def test_documents_are_ranked_in_python_and_by_the_command(trained, tmp_path):
    model, rng = load(trained), random.Random(5)
    query, documents = sentence(rng, "court"), [sentence(rng, TOPIC_NAMES[i]) for i in (0, 3, 1, 2)]
    ranking = model.rank(query, documents)
    assert "rank" in model.methods and ranking[0].index == 1
    assert [ranked.score for ranked in ranking] == sorted((x["score"] for x in model.predict(
        [(query, document) for document in documents])), reverse=True)  # fmt: skip
    assert [ranked.text for ranked in ranking] == [documents[ranked.index] for ranked in ranking]
    assert [ranked.index for ranked in model.rank(query, ["a", "a", "a"])] == [0, 1, 2]
    assert model.rank(query, documents, top_k=2) == ranking[:2] and model.rank(query, []) == []
    (tmp_path / "documents.txt").write_text("\n".join(documents) + "\n")
    flags = f"--query={query}", "--input=documents.txt", "--top_k=2", "--json", "--dtype=float32"
    printed = command("rerank", trained, *flags, cwd=tmp_path)
    rows = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [(row["index"], row["text"]) for row in rows] == [(ranked.index, ranked.text) for ranked in ranking[:2]]


def test_a_run_file_is_reranked_and_evaluated(trained, folder, tmp_path):
    flags = f"--data={folder}/beir", f"--candidates={folder}/run.trec", "--output=new.trec", "--top_k=4"
    result = command("rerank", trained, *flags, cwd=tmp_path)
    assert result.stdout.endswith("32 documents of 8 queries in new.trec\n"), result.stderr
    before, after = trec.read_run(folder / "run.trec"), trec.read_run(tmp_path / "new.trec")
    assert before.keys() == after.keys() and all(set(before[query]) == set(after[query]) for query in before)
    ranks = [after[f"q{i}"].index("d03") for i in range(8)]
    arguments = (f"--data={folder}/beir", "--form=search", f"--candidates={folder}/run.trec", "--json")
    scores = json.loads(command("evaluate", trained, *arguments, cwd=tmp_path).stdout)["scores"]
    assert scores["mrr@10"] == pytest.approx(np.mean([1 / (1 + rank) for rank in ranks]))
    assert scores["base_mrr@10"] == 1 / 4 and scores["base_map"] == 1 / 8  # One of two relevant documents is missing.
    assert scores["ndcg@10"] > scores["base_ndcg@10"]


WARNING = "warning: ndcg@10 is below base_ndcg@10: "


@pytest.mark.parametrize("after, is_warned", [(0.4, True), (0.5, False), (0.6, False), (float("nan"), False)])
def test_evaluate_warns_of_a_reranker_that_makes_the_order_worse(after, is_warned, trained, folder, monkeypatch):
    monkeypatch.setattr(RankedLists, "score", lambda *_: {"ndcg@10": after, "base_ndcg@10": 0.5})
    printed: list[str] = []
    checkpoints.evaluate(trained, folder / "dev.jsonl", on_note=printed.append)
    assert any(line.startswith(WARNING) for line in printed) == is_warned


def test_training_warns_of_a_reranker_that_makes_the_order_worse(folder, checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(RankedLists, "score", lambda *_: {"ndcg@10": 0.4, "base_ndcg@10": 0.5})
    run(config_for(folder, checkpoint, epochs=0.1), tmp_path / "run")
    printed = capsys.readouterr().out
    assert f"\n{WARNING}" in printed
    assert "learns faster with --config.optimizer.learning_rate=0.0002\n" in printed


def test_a_classifier_with_one_label_is_evaluated_as_a_reranker(trained, folder, tmp_path):
    conversion.convert(str(trained), tmp_path / "classifier", "huggingface")
    samples = [
        {"query": row["query"], "positive": row["documents"][:1], "documents": row["documents"][::-1]}
        for row in lists_of(30, 30)
    ]
    write_table(tmp_path / "dev.jsonl", samples)
    scores = checkpoints.evaluate(tmp_path / "classifier", tmp_path / "dev.jsonl", form="rerank").scores
    expected = checkpoints.evaluate(trained, folder / "dev.jsonl").scores
    assert {name: scores[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert 0 < scores["base_ndcg@10"] < scores["ndcg@10"]
    assert load(tmp_path / "classifier").rank("a ship", ["a rose"])[0].index == 0
    assert uses_of(str(tmp_path / "classifier"))[0][:2] == ["bertjax", "rerank"]


# Data and mistakes.


@pytest.mark.parametrize("form, rows, columns, label, expected", [
    ("pairs", [{"q": "a", "p": "b", "n": "c"}, {"q": "a", "p": "b", "n": ""}], "q,p,n", "",
     [("a", ("b", "c"), (1, 0)), ("a", ("b",), (1,))]),
    ("pairs", [{"q": "a", "p": "b", "n": "c", "s": 3, "t": 1}], "q,p,n", "s,t", [("a", ("b", "c"), (3, 1))]),
    ("pairs", [{"q": "a", "p": "b", "n": "c", "margin": 2}], "q,p,n", "margin", [("a", ("b", "c"), (0, -2))]),
    ("pairs", [{"q": "a", "p": "b", "n": "b"}], "q,p,n", "", [("a", ("b",), (1,))]),
    ("labelled", [{"q": "a", "d": "b", "y": 1}, {"q": "x", "d": "b", "y": 0.5}, {"q": "a", "d": "c", "y": 0}], "q,d",
     "y", [("a", ("b", "c"), (1, 0)), ("x", ("b",), (0.5,))]),
    ("lists", [{"q": "a", "d": ["b", {"title": "T", "text": "c"}], "y": [2, 0]}], "q,d", "y",
     [("a", ("b", "T c"), (2, 0))]),
    ("rerank", [{"query": "a", "positive": ["b"], "negative": ["c"]}], "", "", [("a", ("b", "c"), (1, 0))]),
    ("rerank", [{"query": "a", "positive": ["b", "d"], "documents": ["c", "b"]}], "", "",
     [("a", ("c", "b", "d"), (0, 1, 1))]),
])  # fmt: skip
def test_lists_are_read_from_each_form(form, rows, columns, label, expected, tmp_path):
    write_table(tmp_path / "train.jsonl", rows)
    lists = forms.FORMS[form].read(tmp_path / "train.jsonl", columns.split(","), label, "").lists
    assert [(x.query, x.documents, x.grades) for x in lists] == expected


def test_rows_with_and_without_a_first_stage_are_not_mixed(tmp_path):
    rows = [{"query": "a", "positive": ["b"], "negative": ["c"]}, {"query": "x", "positive": ["b"], "documents": ["b"]}]
    write_table(tmp_path / "dev.jsonl", rows)
    with pytest.raises(UserError, match=r"dev.jsonl:2: has 'documents', but earlier rows have not"):
        forms.FORMS["rerank"].read(tmp_path / "dev.jsonl", [], "", "")


def test_documents_with_equal_texts_are_one_document_with_the_highest_grade(tmp_path):
    corpus = [{"_id": name, "text": text} for name, text in (("d1", "same"), ("d2", "same"), ("d3", "x"), ("d4", "y"))]
    write_beir(tmp_path, corpus, [{"_id": "q", "text": "a"}], test=[("q", "d2", 1), ("q", "d4", 2)])
    (tmp_path / "run.trec").write_text("q Q0 d1 1 3 t\nq Q0 d2 2 2 t\nq Q0 d3 3 1 t\n")
    (ranking,) = forms.FORMS["search"].read(tmp_path / "qrels/test.tsv", [], "", str(tmp_path / "run.trec")).lists
    assert ranking == forms.RankingList("a", ("same", "x"), (1.0, 0.0), (("y", 2.0),))


def test_queries_without_candidates_are_counted(trained, folder, tmp_path):
    lines = (folder / "run.trec").read_text().splitlines()
    (tmp_path / "run.trec").write_text("\n".join(line for line in lines if not line.startswith("q0 ")) + "\n")
    notes = []
    description = dict(form="search", candidates=str(tmp_path / "run.trec"))
    checkpoints.evaluate(trained, folder / "beir", on_note=notes.append, **description)
    assert notes[0].endswith("\nlabelled: 1 queries without candidates skipped")
    (tmp_path / "run.trec").write_text("q9 Q0 d00 1 1 t\n")
    with pytest.raises(UserError, match=r"run.trec: the query 'q9' is not in"):
        checkpoints.evaluate(trained, folder / "beir", **description)


@pytest.mark.parametrize("others, skipped", [([], 0), ([[0, 0]], 1), ([[-1, -2], [0, 0]], 2)])
def test_queries_without_a_relevant_document_are_skipped_in_an_evaluation(others, skipped, trained, tmp_path):
    rows = [{"query": f"q{i}", "documents": ["ship", "rose"], "grades": x} for i, x in enumerate([[1, 0], *others])]
    write_table(tmp_path / "dev.jsonl", rows)
    notes = []
    scores = checkpoints.evaluate(trained, tmp_path / "dev.jsonl", on_note=notes.append).scores
    assert scores["ndcg@10"] in (1.0, pytest.approx(1 / np.log2(3)))
    assert (f"{skipped} queries without a relevant document skipped" in notes[0]) == (skipped > 0)
    write_table(tmp_path / "dev.jsonl", rows[1:] or [{**rows[0], "grades": [-1, -2]}])
    with pytest.raises(UserError, match=r"dev.jsonl: no query has a relevant document; add a grade above 0$"):
        checkpoints.evaluate(trained, tmp_path / "dev.jsonl")


def test_scores_of_a_teacher_are_no_grades_of_a_dev_set(checkpoint, tmp_path):
    rng = random.Random(0)
    rows = [{"q": sentence(rng, RELEVANT), "p": "ship", "n": "rose", "margin": 2 + i % 3} for i in range(40)]
    write_table(tmp_path / "all.jsonl", rows)
    fields = {"data.path": str(tmp_path / "all.jsonl"), "data.form": "pairs", "data.texts": "q,p,n"}
    config = config_for(tmp_path, checkpoint, **fields, **{"data.label": "margin", "loss.name": "margin_mse"})
    config, _ = finetuning_run.resolve(config, None)
    data = finetuning_run.load_inputs(config, tmp_path, None).data
    assert {ranking.grades for ranking in data.dev[0].lists.lists} == {(1.0, 0.0)}
    assert {tuple(grades.tolist()) for grades in data.train.grades} <= {(0.0, -2.0), (0.0, -3.0), (0.0, -4.0)}
    config.data.dev.label = "margin"
    with pytest.raises(UserError, match=r"config.data.dev.label = 'margin': config.data.path is one file"):
        finetuning_run.load_inputs(config, tmp_path, None)


@pytest.mark.slow
def test_trials_of_a_sweep_with_different_batches_have_different_losses(folder, checkpoint, tmp_path):
    """The loss of a batch must contain all lists of the batch."""
    fields = {"epochs": 0.2, "eval.patience": 0}
    run(config_for(folder, checkpoint, sweep="batch_size=8,24", **fields), tmp_path / "both")
    run(config_for(folder, checkpoint, sweep="batch_size=24", **fields), tmp_path / "one")
    both, one = (
        [row["train/loss"] for row in read_metrics(tmp_path / name / "runs/batch_size=24") if "train/loss" in row]
        for name in ("both", "one")
    )
    assert both and both == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("form, row, message", [
    ("lists", {"q": "a", "d": [], "y": []}, "train.jsonl:1: the list of documents is empty; a list needs at least one"),
    ("lists", {"q": "a", "d": ["b"], "y": [1, 0]}, "train.jsonl:1: 1 documents in d, but 2 numbers in y"),
    ("lists", {"q": "a", "d": ["b"], "y": [float("nan")]}, "train.jsonl:1: "),
    ("lists", {"q": "a", "d": ["b"], "y": ["NaN"]}, "train.jsonl:1: y is 'NaN', expected a number"),
    ("lists", {"q": "a", "d": "b", "y": [1]}, "train.jsonl:1: d is 'b', expected a list of texts"),
    ("lists", {"q": "a", "d": ["b", "b"], "y": [1, 0]}, "train.jsonl:1: the document 'b' has the grades 1 and 0"),
    ("lists", {"q": " ", "d": ["b"], "y": [1]}, "train.jsonl:1: q is empty"),
    ("labelled", {"q": "a", "d": "b", "y": "high"}, "train.jsonl:1: y is 'high', expected a number"),
    ("rerank", {"query": "a", "positive": [], "negative": ["b"]}, "train.jsonl:1: positive is an empty list"),
    ("rerank", {"query": "a", "positive": ["b"], "negative": ["c"], "documents": ["b"]},
     "train.jsonl:1: has both 'documents' and 'negative'; use one of both"),
    ("lists", {"q": "a", "d": ["b"], "y": [[1]]}, "train.jsonl:1: y has [1], expected a number"),
])  # fmt: skip
def test_a_wrong_list_names_its_line(form, row, message, tmp_path):
    write_table(tmp_path / "train.jsonl", [row])
    with pytest.raises(UserError) as error:
        forms.FORMS[form].read(tmp_path / "train.jsonl", ["q", "d"], "y", "")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("fields, message", [
    ({"loss.name": "hinge"}, "config.loss.name = 'hinge': choose one of binary_cross_entropy, "),
    ({"data.form": "list"}, "config.data.form = 'list': choose one of pairs, labelled, lists, rerank, squad, search"),
    ({"data.label": ""}, "config.data.label = '': must name the column of the grades"),
    ({"data.candidates": "run.trec"}, "config.data.candidates = 'run.trec': a run file names documents by ids"),
    ({"data.form": "pairs", "data.dev.label": "a,b,c"},
     "config.data.dev.label = 'a,b,c': names 3 columns, expected 1 (the score of each document) or 0"),
    ({"data.windows": "sum"}, "config.data.windows = 'sum': "),
    ({"loss.negatives": -1}, "config.loss.negatives = -1: must be the number of in-batch negatives"),
    ({"distill.teacher": "t", "loss.name": "binary_cross_entropy"}, "config.loss.name = 'binary_cross_entropy': needs"),
    ({"distill.teacher": "t", "distill.weight": 0.9}, "config.distill.weight = 0.9: has no effect"),
    ({"loss.name": "binary_cross_entropy"}, "the training data has the grade 2, expected grades from 0 to 1; choose"),
    ({"data.path": "nowhere"}, "config.data.path = 'nowhere': no such file or folder"),
])  # fmt: skip
def test_a_mistake_in_the_config_is_one_line(fields, message, folder, checkpoint, tmp_path):
    config = config_for(folder, checkpoint, **fields)
    with pytest.raises(UserError) as error:
        validate(config)
        finetuning_run.load_inputs(finetuning_run.resolve(config, None).config, tmp_path, None)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("documents, negatives, message", [
    (["a"], 4, "all queries have the same document; add other documents"),
    (["a", "b"], 0, "config.loss.negatives = 0: no query has a document with the grade 0; add such documents"),
])  # fmt: skip
def test_documents_without_negatives_are_refused(documents, negatives, message, folder, checkpoint, tmp_path):
    rows = [{"query": f"q {i}", "documents": [documents[i % len(documents)]], "grades": [1]} for i in range(8)]
    write_table(tmp_path / "train.jsonl", rows)
    shutil.copy(folder / "dev.jsonl", tmp_path)
    fields = {"loss.name": "multiple_negatives", "loss.negatives": negatives}
    config = finetuning_run.resolve(config_for(tmp_path, checkpoint, **fields), None).config
    with pytest.raises(UserError) as error:
        finetuning_run.load_inputs(config, tmp_path, None)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("fields, remedy", [
    ({}, "or set loss.name=binary_cross_entropy"),
    ({"distill.teacher": "t", "loss.name": "kl"}, "or set loss.name=mse"),
])  # fmt: skip
def test_single_documents_need_a_loss_of_single_pairs(fields, remedy, folder, checkpoint, tmp_path):
    rows = [{"query": f"q {i}", "documents": [f"d {i}"], "grades": [i % 2]} for i in range(8)]
    write_table(tmp_path / "train.jsonl", rows)
    shutil.copy(folder / "dev.jsonl", tmp_path)
    config = finetuning_run.resolve(config_for(tmp_path, checkpoint, **fields), None).config
    with pytest.raises(UserError) as error:
        finetuning_run.load_inputs(config, tmp_path, None)
    assert "each list has one document, but" in str(error.value) and str(error.value).endswith(remedy)


def test_trials_of_a_sweep_have_the_same_training_lists(folder, checkpoint):
    fields = sweep.sweep_fields(config_for(folder, checkpoint))
    assert "negatives" not in fields and fields["name"] == "optimizer.name" and fields["scale"] == "loss.scale"


@pytest.mark.parametrize("line, message", [
    ("q0 Q0 d00 1 x tag", "run.trec:1: the score is 'x', expected a number"),
    ("q0 Q0 d00 1 nan tag", "run.trec:1: the score is 'nan', expected a finite number"),
    ("q0 d00 1 0.5", "run.trec:1: 4 columns, expected 6: QUERY Q0 DOCUMENT RANK SCORE TAG"),
    ("q0 Q0 d00 1 2 tag\nq0 Q0 d00 2 1 tag", "run.trec:2: the query 'q0' has the document 'd00' twice"),
    ("x Q0 d00 1 2 tag", "the query 'x' is not in"),
    ("q0 Q0 x 1 2 tag", "the document 'x' is not in"),
    ("", "run.trec: has no line"),
])  # fmt: skip
def test_a_wrong_run_file_is_refused_in_one_line(line, message, trained, folder, tmp_path):
    (tmp_path / "run.trec").write_text(line + "\n")
    with pytest.raises(UserError) as error:
        checkpoints.rerank(trained, folder / "beir", tmp_path / "run.trec", tmp_path / "new.trec")
    assert message in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "new.trec").exists()


@pytest.mark.parametrize("ignores, expected", [(False, ["q1 d1", "q1 d2", "d1 d1", "d1 d2"]),
                                               (True, ["q1 d1", "q1 d2", "d1 d2", "d1 d3"])])  # fmt: skip
def test_a_run_file_can_leave_out_the_document_with_the_id_of_the_query(ignores, expected, tmp_path):
    class Index:
        def search(self, texts, top_k):
            return [[Hit(1.0 / i, f"d{i}", "x") for i in (1, 2, 3)][:top_k] for _ in texts]

    line = run_files.write_run(Index(), {"q1": "a", "d1": "b"}, tmp_path / "run.trec", 2, ignores)
    assert line.startswith("4 documents of 2 queries in ")
    run_lines = (tmp_path / "run.trec").read_text().splitlines()
    assert [" ".join(text.split()[::2][:2]) for text in run_lines] == expected


@pytest.mark.parametrize("rows, flags, message", [
    ([{"_id": "a b", "text": "x"}], ["--run=run.trec"], "queries.jsonl: the id 'a b' has a space"),
    ([{"_id": "a", "text": "x"}, {"_id": "a", "text": "y"}], ["--run=run.trec"], "a second text has the _id 'a'"),
    ([{"_id": "a", "text": "x"}], ["--run=."], ".: is a folder"),
    ([{"_id": "a", "text": "x"}], ["--run=run.trec", "--json"], "--json: is for queries on the command line"),
])  # fmt: skip
def test_a_mistake_is_refused_before_the_search(rows, flags, message, tmp_path):
    write_table(tmp_path / "queries.jsonl", rows)
    (tmp_path / "documents.txt").write_text("a\n")
    flags = ["--queries=queries.jsonl", "--corpus=documents.txt", *flags]
    result = command("search", "no-checkpoint", *flags, cwd=tmp_path)
    assert result.returncode == 1 and message in result.stderr and result.stderr.count("\n") == 1


def test_the_dev_file_of_a_folder_with_a_test_file_is_the_dev_set(tmp_path):
    for name in ("dev", "test"):
        write_table(tmp_path / f"{name}.jsonl", [{"query": name, "positive": ["b"], "negative": ["c"]}])
    source = sets.ListSource("data", str(tmp_path), "rerank", "", "")
    assert [ranking.query for ranking in sets.read_dev(source).lists] == ["dev"]
    (tmp_path / "dev.jsonl").unlink()
    assert [ranking.query for ranking in sets.read_dev(source).lists] == ["test"]


def test_an_interrupted_reranking_writes_no_file(trained, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "DOCUMENTS_AT_ONCE", 20)
    scores, calls = Ranker.scores, itertools.count()

    def interrupted(ranker, pairs):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return scores(ranker, pairs)

    monkeypatch.setattr(Ranker, "scores", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.rerank(trained, folder / "beir", folder / "run.trec", tmp_path / "new.trec")
    assert next(calls) == 2 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments, message", [
    (["a document"], "error: --query: is missing or blank"),
    (["--query= ", "a document"], "error: --query: is missing or blank"),
    (["--query=a", "a document", "--top_k=0"], "error: flag --top_k=0: 0 is not a positive integer"),
    (["--query=a"], "error: no text for the checkpoint"),
    (["--query=a", "--input=none.txt"], "error: --input=none.txt: no such file"),
    (["--data=beir"], "error: --candidates: is missing; run files need --data, --candidates and --output"),
    (["--data=none", "--candidates=run.trec", "--output=x"], "error: --data=none: no such folder"),
    (["--data=beir", "--candidates=run.trec", "--output=x", "--json"], "error: --json=True: is for one query"),
    (["--data=beir", "--candidates=run.trec", "--output=beir"], "error: beir: is a folder; name a file to write"),
])  # fmt: skip
def test_a_wrong_flag_of_rerank_is_refused_in_one_line(arguments, message, trained, folder):
    result = command("rerank", trained, *arguments, cwd=folder)
    assert result.returncode == 1 and result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_a_checkpoint_without_scores_is_no_reranker(trained, checkpoint, folder, tmp_path):
    with pytest.raises(UserError, match="was not trained for rank; the available methods are fill_mask"):
        load(checkpoint).rank("a", ["b"])
    two_labels = dataclasses.replace(
        pretrained.read_pretrained(checkpoint), architecture="BertForSequenceClassification"
    )
    two_labels.params["classifier"] = {"dense": {"kernel": np.zeros((32, 2)), "bias": np.zeros(2)}}
    assert not is_reranker(two_labels)
    with pytest.raises(UserError, match=r"query = \['a'\]: must be a str"):
        load(trained).rank(["a"], ["b"])
    with pytest.raises(UserError, match="must compute one score for a pair of texts"):
        checkpoints.rerank(checkpoint, folder / "beir", folder / "run.trec", tmp_path / "new.trec")


def test_the_command_after_a_run_or_its_conversion_ranks_documents(trained, tmp_path):
    folder, again = tmp_path / "cross-encoder", tmp_path / "again"
    conversion.convert(str(trained), folder, "huggingface")
    conversion.convert(folder, again, "bertjax")
    for checkpoint in map(str, (trained, folder, again)):
        assert uses_of(checkpoint)[0][:3] == ["bertjax", "rerank", checkpoint]
