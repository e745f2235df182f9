"""A run of the task embed from its dev set to the commands that use its vectors."""

import dataclasses
import json
import random

import numpy as np
import pytest

from bertjax.config import UserError
from bertjax.experiment import load
from bertjax.interop import pretrained
from bertjax.tasks import embed, finetuning_run, metrics, text_sets, validate
from bertjax.tasks.launch import launch
from tests.conftest import TOPICS
from tests.processes import ROOT
from tests.processes import run as command
from tests.tasks.test_classify import write_table
from tests.tasks.test_mining import write_beir

pytestmark = pytest.mark.usefixtures("on_one_device")


def sentence(rng, topic):
    return " ".join(rng.choices(TOPICS[topic], k=5))


def labelled_pairs(count, seed):
    """Pairs of texts about one topic, 1, or two, 0."""
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
    """(folder with labelled pairs, and what is looked for in BEIR's layout, workdir of a finished run on the pairs)."""
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
    validate(config)
    launch(config, folder / "run")
    return folder, folder / "run"


def test_a_file_is_judged_as_the_dev_set_was_and_with_its_thresholds(trained, tmp_path):
    folder, workdir = trained
    source = pretrained.read(workdir)
    assert source.scores.keys() == {"average_precision", "accuracy", "f1", "average_precision_8"}
    assert source.decided.keys() == {"accuracy_threshold", "f1_threshold"} and source.scores["accuracy"] > 0.6
    given = ("evaluate", f"--checkpoint={workdir}", "--json", "--dtype=float32")
    result = command(*given, f"--data={folder}/dev.csv", cwd=tmp_path)
    again = {"scores": pytest.approx(source.scores), "decided": source.decided}
    assert json.loads(result.stdout) == again, result.stderr
    # Other columns are named by flags, and the thresholds stay those of the dev set, whatever would be the best here.
    rows = labelled_pairs(60, 5)
    cosines = [each["cosine"] for each in embed.predict(source, [(row["a"], row["b"]) for row in rows])]
    odd = [{"c": row["a"], "d": row["b"], "same": int(cosine > 0.95)} for row, cosine in zip(rows, cosines)]
    write_table(tmp_path / "odd.csv", odd)
    result = command(*given, "--data=odd.csv", "--texts=c,d", "--label=same", "--widths=", cwd=tmp_path)
    found = json.loads(result.stdout)
    predicted = np.array(cosines) >= source.decided["accuracy_threshold"]
    assert found["scores"].keys() == {"average_precision", "accuracy", "f1"} and found["decided"] == source.decided
    assert found["scores"]["average_precision"] == pytest.approx(1)
    assert found["scores"]["accuracy"] == metrics.accuracy([row["same"] for row in odd], predicted) < 1


@pytest.mark.slow
def test_retrieval_is_judged_with_both_prompts(trained, tmp_path):
    folder, workdir = trained
    source = pretrained.read(workdir)
    arguments = (f"--data={folder}/beir", "--form=search", "--widths=4", "--dtype=float32")
    result = command("evaluate", f"--checkpoint={workdir}", *arguments, "--json", cwd=tmp_path)
    scores = json.loads(result.stdout)["scores"]
    assert scores.keys() == {"ndcg@10", "mrr@10", "recall@1", "recall@10", "ndcg@10_4"}, result.stderr
    search = text_sets.read_training_search(f"{folder}/beir/qrels/test.tsv", "search", "")
    queries = embed.vectors_of(source, "ask : ")(search.queries)[0]
    documents = embed.vectors_of(source, "tell : ")(search.documents)[0]
    order = np.argsort(-(queries @ documents.T), axis=1, kind="stable")
    found = [[number in relevant for number in row[:10].tolist()] for row, relevant in zip(order, search.relevant)]
    assert scores["recall@10"] == pytest.approx(np.sum(found) / 24) and scores["recall@10"] < 1
    assert scores["recall@1"] == pytest.approx(np.sum(found, 0)[0] / 24)


def test_negatives_are_mined_with_a_checkpoint_and_learnt_from(trained, checkpoint, tmp_path):
    folder, workdir = trained
    (tmp_path / "more.txt").write_text("the whale\nthe soup\n")
    given = ("mine", f"--checkpoint={workdir}", f"--data={folder}/beir", "--form=search", "--output=mined.jsonl")
    result = command(*given, "--corpus=more.txt", "--negatives=2", "--first=2", "--last=8", cwd=tmp_path)
    lines = result.stdout.splitlines()
    assert lines[0] == "2 negatives for 12 of 12 queries: 24 rows in mined.jsonl", result.stderr
    assert lines[1] == "84 candidates have ranks from 2 to 8" and lines[2].startswith("mean cosines: ")
    mined = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    assert list(mined[0]) == ["anchor", "positive", "negative_1", "negative_2"]
    data = dict(path=str(tmp_path / "mined.jsonl"), texts="anchor,positive,negative_1,negative_2")
    config = config_for(checkpoint, **data)
    config.data.dev.update(path=f"{folder}/beir/qrels/test.tsv", form="search")
    validate(config)
    dataset = embed.load(config, pretrained.read_tokenizer(checkpoint))
    assert dataset.metric == "ndcg@10" and len(dataset.train) == 24
    assert "12 dev queries for 40 documents: 52 texts" in dataset.notes


@pytest.mark.slow
def test_vectors_and_cosines_are_predicted_of_a_table(trained, tmp_path):
    folder, workdir = trained
    given = ("predict", f"--checkpoint={workdir}", f"--input={folder}/dev.csv", "--text=a")
    result = command(*given, "--output=out.csv", cwd=tmp_path)
    assert result.stdout == "60 predictions in out.csv\n", result.stderr
    result = command(*given, "--second_text=b", "--dtype=float32", cwd=tmp_path)
    row = json.loads(result.stdout.splitlines()[0])
    source = pretrained.read(workdir)
    # Neither of the two texts that the run has learnt from is a document.
    vectors, _ = embed.vectors_of(source, "ask : ")([row[name] for name in ("a", "b")])
    assert row["predicted"]["cosine"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)


BAD = [
    (["--negatives=9", "--first=4", "--last=11"], "--negatives=9: ranks 4 to 11 hold 8; set --last"),
    (["--first=4", "--last=3"], "--first=4: must not be above --last=3"),
    (["--margin=much"], "--margin=much: write a number, such as 0.1, or a share, such as 5%"),
    (["--max_score=nan"], "--max_score=nan: write a number"),
    (["--min_score=0.5", "--max_score=0.4"], "--min_score=0.5: must not be above --max_score=0.4"),
    (["--output=mined.txt"], "--output=mined.txt: must end in one of .csv, .tsv, .jsonl"),
    (["--data=nowhere"], "--data=nowhere: no such file or folder"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_negatives_that_cannot_be_mined_are_refused_in_one_line(arguments, message, tmp_path):
    given = ("--checkpoint=run", "--data=dev.csv", "--output=mined.csv")
    result = command("mine", *given, *arguments, cwd=tmp_path)
    assert result.returncode == 1 and result.stderr == f"error: {message}\n"


@pytest.mark.parametrize("said, message", [
    (dict(form="sentences"), r"^--form=sentences: choose one of pairs, scored, labelled, squad, search$"),
    (dict(widths="64"), r"^--widths=64: 64 is more than the 32 numbers of a vector$"),
    (dict(widths="8,x"), r"^--widths=8,x: write widths such as 256,128,64$"),
    (dict(texts="a"), r"^--texts=a: labelled pairs have two texts: name their two columns$"),
    (dict(label="score"), r"dev.csv:2: no column 'score'; there are a, b, label$"),
])  # fmt: skip
def test_sets_that_cannot_be_judged_by_are_refused(said, message, trained):
    folder, workdir = trained
    with pytest.raises(UserError, match=message):
        embed.labelled(pretrained.read(workdir), f"{folder}/dev.csv", **said)


def test_what_has_no_vectors_says_so(checkpoint, trained, tmp_path):
    folder, _ = trained
    data = f"--data={folder}/beir/qrels/test.tsv", "--form=search"
    result = command("mine", f"--checkpoint={checkpoint}", *data, "--output=mined.csv", cwd=tmp_path)
    assert result.returncode == 1 and "must have vectors of texts: the workdir of a run" in result.stderr


def test_sentences_are_no_dev_set(checkpoint, trained):
    config = config_for(checkpoint, path=str(trained[0]), form="sentences", texts="a")
    with pytest.raises(UserError, match=r"^config.data.dev.form = 'sentences': texts by themselves judge nothing; set"):
        validate(config)
    config.data.dev.update(path=f"{trained[0]}/dev.csv", form="labelled", texts="a,b")
    validate(config)


def test_thresholds_that_no_dev_set_has_decided_are_tuned_on_the_file(trained):
    folder, workdir = trained
    source = pretrained.read(workdir)
    bare = dataclasses.replace(source, decided={})
    scores = finetuning_run.score(bare, *embed.labelled(bare, f"{folder}/dev.csv"))
    assert scores.decided == pytest.approx(source.decided) and scores.scores == pytest.approx(source.scores)
