"""Fine-tuning from files to scores, sweeps over settings, and a task that is defined outside of the package."""

import dataclasses
import importlib.metadata
import json
import os
import random
import re
import shutil
import signal

import flax.linen as nn
import jax
import numpy as np
import pytest
from etils import epath

from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.defaults import fine_tuning_config, pretraining_config
from bertjax.config.model_config import BertConfig
from bertjax.data.loading.examples import Examples
from bertjax.finetuning import run as finetuning_run
from bertjax.finetuning import sweep
from bertjax.finetuning import task as finetuning_task
from bertjax.finetuning.encoding import encode_pairs
from bertjax.finetuning.task import FineTuning, FineTuningEvaluator, check_indices
from bertjax.finetuning.tasks import classify, glue
from bertjax.inference import heads, predictor, tasks
from bertjax.interop import conversion, pretrained
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.reporting import page
from bertjax.text.tokenizer import SPECIAL_TOKENS, WordPiece
from bertjax.training.checkpoints import checkpoint as checkpoints
from bertjax.training.checkpoints import workdir as workdirs
from bertjax.training.hooks.divergence import DivergenceError
from bertjax.training.loop import TrainingResult
from bertjax.training.scores import Scores
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import TOPICS, launch_and_stop, one_device_mesh
from tests.finetuning import own_task
from tests.markers import slow_case
from tests.processes import ROOT
from tests.processes import run as command
from tests.test_several_hosts import assert_same_run, finish, is_silent, start


def write_lines(path, *lines: str) -> None:
    path.write_text("\n".join(lines) + "\n")


def write_sst2(folder, train=300, dev=45):
    """Writes files in the format of SST-2; texts about the sea are positive."""
    for name, count, seed in (("train", train, 0), ("dev", dev, 1)):
        rng = random.Random(seed)
        topics = rng.choices(sorted(TOPICS), k=count)
        rows = [f"{' '.join(rng.choices(TOPICS[x], k=rng.randint(2, 9)))}\t{int(x == 'sea')}" for x in topics]
        (folder / "SST-2").mkdir(exist_ok=True)
        write_lines(folder / f"SST-2/{name}.tsv", "sentence\tlabel", *rows)


def quick(config, folder, checkpoint, **fields):
    """Returns the config of a short run without dropout."""
    config.data.path, config.init_checkpoint = str(folder), str(checkpoint)
    config.update(dict(batch_size=16, max_seq_length=32, log_every_steps=5, epochs=4.0, dtype="float32"), **fields)
    config.optimizer.learning_rate = 3e-3
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return config


def config_for(folder, checkpoint, name="sst2", **fields):
    return quick(fine_tuning_config("glue", name=name), folder, checkpoint, **fields)


def run(config, workdir):
    validate(config)
    launch(config, workdir)


@pytest.fixture(scope="module")
def tuned(checkpoint, tmp_path_factory):
    """(folder of the data, workdir of a finished run on the data)."""
    folder = tmp_path_factory.mktemp("glue")
    write_sst2(folder)
    run(config_for(folder, checkpoint), folder / "run")
    return folder, folder / "run"


def test_fine_tuning_trains_and_scores_a_task(tuned):
    _, workdir = tuned
    lines = read_metrics(workdir)
    scored = [line for line in lines if "eval/accuracy" in line]
    assert [line["step"] for line in scored] == [19, 38, 57, 76]  # after every epoch of 19 steps
    assert scored[-1]["eval/accuracy"] > 0.9
    best, last = (100 * score for score in (max(x["eval/accuracy"] for x in scored), scored[-1]["eval/accuracy"]))
    report = (workdir / "report.txt").read_text()  # the best and the latest checkpoint
    assert (
        report.startswith(f"dev: accuracy {best:.2f}")
        and f"dev: accuracy {last:.2f}\nbaseline (the same prediction for all examples): " in report
    )


def test_a_finished_run_is_reported_and_not_trained(tuned, checkpoint, capsys):
    folder, workdir = tuned
    run(config_for(folder, checkpoint, log_every_steps=7, seed=3), workdir)
    printed = capsys.readouterr().out
    assert (
        printed.startswith(f"already finished: 76 steps, in {workdir}\ndev: accuracy") and "seed = 3 (was 0)" in printed
    )
    with pytest.raises(
        UserError, match=r"the checkpoint is at step 76, past the last step of the config, 38; choose another --workdir"
    ):
        run(config_for(folder, checkpoint, epochs=2.0), workdir)
    with pytest.raises(UserError, match=r"config.data.name = 'cola': .* holds a run with 'sst2'"):
        run(config_for(folder, checkpoint, name="cola"), workdir)


@pytest.mark.parametrize("changes, message", [
    (dict(input_ids=[np.array([2, 5, 100])]), "has 100 as token id, which must be from 0 to 99"),
    (dict(token_types=[np.array([0, 0, 2])]), "has 2 as token type, which must be from 0 to 1"),
    (dict(labels=np.array([3])), "has 3 as label, which must be from 0 to 2"),
    (dict(labels=[np.array([-1, 0, 5])], per_token=True), "has 5 as label"),
])  # fmt: skip
def test_out_of_range_indices_are_refused(changes, message):
    model = BertConfig(vocab_size=100, type_vocab_size=1)
    fine = Examples([np.array([2, 5, 3])], [np.array([0, 0, 1])], np.array([2]))
    check_indices(fine, ("a", "b", "c"), model)
    with pytest.raises(UserError, match=message):
        check_indices(dataclasses.replace(fine, **changes), ("a", "b", "c"), model)


def test_changed_data_is_named_and_refused(tuned, checkpoint, tmp_path, capsys):
    """With swapped labels and equal row counts, a finished run reports the change; a longer run refuses the data."""
    shutil.copytree(tuned[0], tmp_path / "moved")
    shutil.copytree(tuned[1], tmp_path / "run")
    config, train = config_for(tmp_path / "moved", checkpoint), tmp_path / "moved/SST-2/train.tsv"
    run(config, tmp_path / "run")
    assert "no longer" not in capsys.readouterr().out, "a moved folder is accepted"
    train.write_text(train.read_text().translate({ord("0"): "1", ord("1"): "0"}))
    run(config, tmp_path / "run")
    assert "the data has changed since this run: SST-2/train.tsv has changed" in capsys.readouterr().out
    config.epochs = 5.0
    with pytest.raises(UserError, match=r"holds a run on other data \(SST-2/train.tsv changed\); restore the data"):
        run(config, tmp_path / "run")


def test_predictions_of_a_run_equal_predictions_of_the_exported_model(tuned, tmp_path):
    """The workdir and its export to Hugging Face's format give equal predictions for the dev set."""
    folder, workdir = tuned
    source, (_, *lines) = pretrained.read_pretrained(workdir), (folder / "SST-2/dev.tsv").read_text().splitlines()
    texts, labels = zip(*(line.split("\t") for line in lines))
    conversion.convert(workdir, tmp_path / "hf", "huggingface")
    fields = json.loads((tmp_path / "hf/config.json").read_text())
    assert fields["architectures"] == ["BertForSequenceClassification"] and fields["id2label"] == {"0": "0", "1": "1"}
    texts = [(text,) for text in texts]
    guesses = list(classify.TASK.predict(source, texts))
    assert guesses == list(classify.TASK.predict(pretrained.read_pretrained(tmp_path / "hf"), texts))
    right = np.mean([guess["label"] == label for guess, label in zip(guesses, labels)])
    # the best checkpoint, not the latest
    assert right == max(line.get("eval/accuracy", 0) for line in read_metrics(workdir))
    assert all(abs(sum(guess["probabilities"].values()) - 1) < 1e-5 for guess in guesses)
    scores = finetuning_run.score(source, glue.TASK.read_labelled(source, folder / "SST-2/dev.tsv"))
    assert scores.scores == source.scores and finetuning_run.report(scores, "dev.tsv").startswith("dev.tsv: accuracy ")


@pytest.mark.slow
def test_predictions_use_the_dtype_of_the_run_or_of_the_flag(tuned):
    ids = tokenizer().encode_ids(["ship sail wave", "bread oven butter knife"])
    examples, logits = Examples(ids, [np.zeros_like(x) for x in ids]), {}
    for dtype in ("", "float32", "bfloat16"):
        source = pretrained.read_with_tokenizer(tuned[1], *filter(None, [dtype]))
        logits[dtype] = np.array(predictor.predict(heads.ClassificationHead(2), source, examples))
    assert (logits[""] == logits["float32"]).all()
    difference = np.linalg.norm(logits["bfloat16"] - logits[""]) / np.linalg.norm(logits[""])
    assert 1e-6 < difference < 2e-2


def test_the_checkpoint_decides_the_model_config(tuned, checkpoint):
    config = config_for(tuned[0], checkpoint, max_seq_length=128)
    with pytest.raises(UserError, match=r"config.max_seq_length = 128: .* has 64 positions only; set"):
        config, _ = finetuning_run.resolve(config, None)
    config.max_seq_length, config.model.hidden_size = 64, 96
    with pytest.raises(
        UserError, match=r"config.model.hidden_size = 96: the run in this workdir has 32; leave the field out"
    ):
        run(config, tuned[1])


@pytest.mark.slow
def test_two_hosts_train_and_score_like_one_host(checkpoint, tmp_path):
    """The hosts neither lose nor repeat examples of the dev set, and a sweep chooses the same best run."""
    write_sst2(tmp_path, train=96)
    run(config_for(tmp_path, checkpoint, epochs=1.0), tmp_path / "alone")
    fields = ["batch_size=16", "max_seq_length=32", "log_every_steps=5", "epochs=1", "dtype=float32",
              "model.hidden_dropout_prob=0.0", "model.attention_probs_dropout_prob=0.0", f"data.path={tmp_path}",
              f"init_checkpoint={checkpoint}", "sweep=learning_rate=1e-9,3e-3"]  # fmt: skip
    experiment = f"--config={ROOT}/experiments/glue.py:sst2"
    flags = [experiment, f"--workdir={tmp_path / 'two'}", *(f"--config.{field}" for field in fields)]
    first, second = finish(start(2, *flags))
    assert first[0] == second[0] == 0, (first[2] + second[2])[-3000:]
    assert is_silent(second[1]), second[1]  # one host prints
    results = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("two/runs/*/result.json")}
    best = max(results, key=lambda name: results[name]["scores"]["accuracy"])
    assert len(results) == 2 and (tmp_path / "two/best").read_text() == f"runs/{best}\n"
    assert_same_run(tmp_path / "two/runs/learning_rate=0.003", tmp_path / "alone")


@pytest.mark.slow
def test_a_head_for_other_labels_is_not_loaded(tuned, tmp_path, capsys):
    """Both heads have two labels, but different ones."""
    config = config_for(tuned[0], tuned[1])
    config, _ = finetuning_run.resolve(config, None)
    opened = finetuning_run.KIND.open(config, tmp_path, None)
    opened.initial_params(nn.meta.unbox(jax.jit(opened.task.init_params)(jax.random.key(0))))
    printed = capsys.readouterr().out
    assert (
        "initialized at random: classifier/dense/bias, classifier/dense/kernel; not used: classifier/dense/bias, classi"
        in printed
    )


def test_predict_prints_json_lines_and_writes_submissions(tuned, tmp_path):
    _, workdir = tuned
    (tmp_path / "texts.txt").write_bytes(b"\xef\xbb\xbfrose spade\r\n\r\nanchor whale net\r\n")  # as on Windows
    result = command("predict", f"--checkpoint={workdir}", "--input=texts.txt", "ship sail", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    predictions = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["text"], line["label"]) for line in predictions] == [
        ("ship sail", "1"), ("rose spade", "0"), ("anchor whale net", "1")
    ]  # fmt: skip
    assert all(line["probabilities"][line["label"]] > 0.5 for line in predictions)

    (tmp_path / "test.tsv").write_text("index\tsentence\n7\tship sail\n9\trose spade\n")
    result = command("submit", f"--checkpoint={workdir}", "--input=test.tsv", "--output=SST-2.tsv", cwd=tmp_path)
    assert result.stdout == "2 predictions in SST-2.tsv\n", result.stderr
    assert f"next:\n  bertjax predict {workdir} 'a text'\n" in result.stderr
    assert (tmp_path / "SST-2.tsv").read_text() == "index\tprediction\n7\t1\n9\t0\n"

    result = command("predict", f"--checkpoint={workdir}", "--top_k=3", "ship", cwd=tmp_path)
    assert re.fullmatch(rf"error: --top_k=3: {workdir}\S* is fine-tuned, and predicts no words\n", result.stderr)
    result = command("predict", f"--checkpoint={workdir}", "ship ||| sail ||| net", cwd=tmp_path)
    message = "error: 'ship ||| sail ||| net': this checkpoint expects texts, or pairs as \"A ||| B\""
    assert result.returncode == 1 and result.stderr.startswith(message)


def tokenizer():
    words = [word for words in TOPICS.values() for word in words]
    return WordPiece([*SPECIAL_TOKENS, *words], lowercase=True)


def test_pairs_are_truncated_like_googles_code():
    pieces, rng = tokenizer(), random.Random(0)
    firsts, seconds = ([rng.choices(range(5, 45), k=rng.randint(1, 30)) for _ in range(200)] for _ in range(2))
    texts = [[" ".join(pieces.pieces[i] for i in ids) for ids in side] for side in (firsts, seconds)]
    for length in (8, 13, 20, 64):
        ids, types, lost = encode_pairs(pieces, *texts, length)
        for row, (a, b) in enumerate(zip(firsts, seconds)):
            short_a, short_b = list(a), list(b)
            while len(short_a) + len(short_b) > length - 3:
                (short_a if len(short_a) > len(short_b) else short_b).pop()
            assert ids[row].tolist() == [pieces.cls_id, *short_a, pieces.sep_id, *short_b, pieces.sep_id]
            assert types[row].tolist() == [0] * (len(short_a) + 2) + [1] * (len(short_b) + 1)
            assert lost[row] == len(a) + len(b) - len(short_a) - len(short_b)
    ids, types, lost = encode_pairs(pieces, ["ship sail harbour wave"], None, 5)
    assert len(ids[0]) == 5 and ids[0][-1] == pieces.sep_id and lost == [1] and not types[0].any()


@pytest.mark.parametrize("name, rows, message", [
    ("sst2", "sentence\tlabel\nship\t2\n", r"train.tsv:2: unknown label '2'; expected one of 0, 1"),
    ("sst2", "sentence\tlabels\nship\t1\n", r"train.tsv:2: no column 'label'; the columns are sentence, labels"),
    ("sst2", "sentence\tlabel\n", r"train.tsv: has no example"),
    ("stsb", "sentence1\tsentence2\tscore\nship\tsail\tmuch\n", r"train.tsv:2: score is 'much', expected a number"),
])  # fmt: skip
def test_mistakes_in_a_file_are_named_with_the_line(checkpoint, tmp_path, name, rows, message):
    for file in ("train.tsv", "dev.tsv"):
        (tmp_path / file).write_text(rows)
    with pytest.raises(UserError, match=message):
        glue.TASK.load(config_for(tmp_path, checkpoint, name), tokenizer())


# Folder: the header of its files, or None; two training rows; one row of dev, and one row of MNLI's other dev set.
GLUE = {
    "CoLA": (None, ["gj04\t1\t\tthe ship", 'gj04\t0\t*\tsail "the'], "gj04\t0\t*\twhale"),
    "SST-2": ("sentence\tlabel", ["ship\t1", 'sail "the\t0'], "whale\t0"),
    "MRPC": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", ['1\t1\t2\t"ship\tsail', "0\t1\t2\tship\tsail"],
             "0\t1\t2\twhale\tnet"),
    "STS-B": ("index\tsentence1\tsentence2\tscore", ["0\tship\tsail\t4.5", "1\tship\tsail\t0.0"], "0\twhale\tnet\t2.5"),
    "QQP": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", ["0\t1\t2\tship\tsail\t1", "broken",
            "0\t1\t2\ta\tb\t0"], "0\t1\t2\twhale\tnet\t0"),
    "MNLI": ("index\tsentence1\tsentence2\tgold_label", ["0\tship\tsail\tneutral", "1\tship\tsail\tcontradiction"],
             "0\twhale\tnet\tentailment", "0\tnet\twhale\tneutral"),
    "QNLI": ("index\tquestion\tsentence\tlabel", ["0\tship\tsail\tentailment", "1\tship\tsail\tnot_entailment"],
             "0\twhale\tnet\tnot_entailment"),
    "RTE": ("index\tsentence1\tsentence2\tlabel", ["0\tship\tsail\tentailment", "1\tship\tsail\tnot_entailment"],
            "0\twhale\tnet\tnot_entailment"),
    "WNLI": ("index\tsentence1\tsentence2\tlabel", ['0\t"""ship"""\tsail\t1', "1\tship\tsail\t0"], "0\twhale\tnet\t0"),
}  # fmt: skip
ONE, TWO = "[CLS] whale [SEP]", "[CLS] whale [SEP] net [SEP]"
# Task: the label names; the labels of the training rows; the first training row as it is read; for each dev set a
# score, the text and its label.
GLUE_AS_READ = {
    "cola": ("0 1", [1, 0], "[CLS] [UNK] ship [SEP]", [("matthews", ONE, 0)]),
    "sst2": ("0 1", [1, 0], "[CLS] ship [SEP]", [("accuracy", ONE, 0)]),
    "mrpc": ("0 1", [1, 0], "[CLS] [UNK] ship [SEP] sail [SEP]", [("f1", TWO, 0)]),
    "stsb": ("", [4.5, 0.0], "[CLS] ship [SEP] sail [SEP]", [("spearman", TWO, 2.5)]),
    "qqp": ("0 1", [1, 0], "[CLS] ship [SEP] sail [SEP]", [("f1", TWO, 0)]),
    "mnli": ("contradiction entailment neutral", [2, 0], "[CLS] ship [SEP] sail [SEP]",
             [("accuracy", TWO, 1), ("accuracy_mismatched", "[CLS] net [SEP] whale [SEP]", 2)]),
    "qnli": ("entailment not_entailment", [0, 1], "[CLS] ship [SEP] sail [SEP]", [("accuracy", TWO, 1)]),
    "rte": ("entailment not_entailment", [0, 1], "[CLS] ship [SEP] sail [SEP]", [("accuracy", TWO, 1)]),
    "wnli": ("0 1", [1, 0], "[CLS] [UNK] [UNK] [UNK] ship [UNK] [UNK] [UNK] [SEP] sail [SEP]", [("accuracy", TWO, 0)]),
    "ax": ("contradiction entailment neutral", [2, 0], "[CLS] ship [SEP] sail [SEP]",
           [("accuracy", TWO, 1), ("accuracy_mismatched", "[CLS] net [SEP] whale [SEP]", 2),
            ("matthews_diagnostics", "[CLS] storm [SEP] wave [SEP]", 0)]),
}  # fmt: skip


def write_glue(path):
    """Writes columns in the order of the distribution, with a quotation mark that quotes nothing."""
    for folder, (header, train, dev, *other_rows) in GLUE.items():
        (path / folder).mkdir()
        files = {"train": train, "dev": [dev], "dev_matched": [dev], "dev_mismatched": other_rows}
        for file, rows in files.items():
            write_lines(path / folder / f"{file}.tsv", *([header] if header else []), *rows)
    write_lines(path / "MNLI/diagnostic-full.tsv", "Premise\tHypothesis\tLabel", "storm\twave\tcontradiction")


@pytest.mark.parametrize("name", GLUE_AS_READ)
def test_every_glue_task_reads_the_distributed_files(tmp_path, name):
    write_glue(tmp_path)
    config, pieces = fine_tuning_config("glue", name=name), tokenizer()
    config.data.path = str(tmp_path)
    dataset = glue.TASK.load(config, pieces)
    names, labels, first, dev = GLUE_AS_READ[name]

    def text(examples):
        return " ".join(pieces.pieces[i] for i in examples.input_ids[0])

    assert dataset.labels == tuple(names.split()) and dataset.train.labels.tolist() == labels
    assert text(dataset.train) == first
    assert [(text(split.examples), *split.examples.labels.tolist()) for split in dataset.dev] == [x[1:] for x in dev]
    for split, (score, _, label) in zip(dataset.dev, dev):
        logits = np.array([np.eye(3)[label] if names else [label]])
        assert score in split.score(logits) and (score != "accuracy" or split.score(logits)[score] == 1)
    if name == "qqp":
        assert ", 1 skipped (1 with a wrong number of columns); " in dataset.notes[0]


@pytest.mark.parametrize("packing", [False, True])
def test_flops_are_exact_in_two_epochs_and_an_average_later(tuned, checkpoint, packing, monkeypatch):
    config = config_for(tuned[0], checkpoint, epochs=40.0)
    config, _ = finetuning_run.resolve(config, None)
    config.packing = packing
    dataset = glue.TASK.load(config, pretrained.read_tokenizer(checkpoint))
    task = FineTuning(config, one_device_mesh(config), dataset)
    size = task._order.steps_per_epoch
    exact = [task.data.head.flops(task.model, *task._order.shape(step)) for step in range(2 * size)]
    assert task.flops(0, 2 * size) == sum(exact) and task.flops(size - 3, size + 2) == sum(exact[size - 3 : size + 2])
    assert task.flops(3, task.total_steps) == pytest.approx(sum(exact) * 20, rel=0.1) and task.flops(5, 5) == 0
    monkeypatch.setattr(finetuning_task, "MAX_SHAPES", size)
    assert task.flops(0, 2 * size) == pytest.approx(sum(exact), rel=0.3) and task.flops(3, 5) == sum(exact[3:5])


def test_a_workdir_refuses_incompatible_configs(tuned, checkpoint, tmp_path):
    """The config of another task, and a vocabulary that is too large, are refused."""
    folder, workdir = tuned
    other, config = pretraining_config(), config_for(folder, checkpoint)
    other.data.corpus, other.init_checkpoint = str(folder / "test.tsv"), str(checkpoint)
    with pytest.raises(UserError, match=r"config.task = 'pretraining': .* holds a run with 'glue'; choose another"):
        launch(other, workdir)
    WordPiece([*SPECIAL_TOKENS, *(f"word{i}" for i in range(500))], lowercase=True).save(tmp_path)
    config.tokenizer.path = str(tmp_path / "vocab.txt")
    with pytest.raises(UserError, match=r"config.tokenizer.path = .*: has 505 tokens, but the model has"):
        launch(config, tmp_path / "other")


# The sweep over hyperparameters: every trial runs once, with one compilation; the best trial is kept; failures are
# shown.


def parse(text):
    config = fine_tuning_config("glue", name="sst2")
    config.sweep = text
    return sweep.parse_sweep(config)


def test_the_sweep_of_the_paper_has_24_runs():
    runs = parse("paper")
    assert len(runs) == 24 and runs[0] == {"batch_size": 16, "learning_rate": 5e-5, "epochs": 2.0}
    assert len(parse("paper seed=0,1,2")) == 72
    assert parse("seed=1,2") == [{"seed": 1}, {"seed": 2}]
    assert len({sweep.trial_name(settings) for settings in parse("paper seed=20240101,20240102,20240101")}) == 48
    # Any field of the optimizer can be swept.
    assert parse("weight_decay=0,0.1 bias_correction=False")[1] == {"bias_correction": False, "weight_decay": 0.1}


@pytest.mark.parametrize("text, message", [
    ("layers=last", r"config.sweep = 'layers=last': 'layers=last' is not a setting"),
    ("seed", r"'seed' is not a setting"),
    ("epochs=two", r"'two': invalid values for epochs"),
])  # fmt: skip
def test_invalid_sweeps_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


@pytest.mark.slow
def test_a_sweep_compiles_once_resumes_and_keeps_the_best_checkpoint(checkpoint, tmp_path, monkeypatch, with_pictures):
    """The first trial has a zero learning rate; a signal stops the second trial in its last evaluation."""
    write_sst2(tmp_path, train=192)
    config = config_for(tmp_path, checkpoint, sweep="learning_rate=1e-8,3e-3 epochs=5", max_seq_length=16)
    config.checkpoint.every_steps = 20
    validate(config)
    programs, starts = [], []
    evaluate, batches, program_class = FineTuningEvaluator.run, FineTuning.batches, sweep.Program

    def watched(self, start_step):
        starts.append(start_step)
        return batches(self, start_step)

    def stopped(self, *arguments):
        if len(starts) == 2:
            raise KeyboardInterrupt
        return evaluate(self, *arguments)

    monkeypatch.setattr(sweep, "Program", lambda *arguments: programs.append(program_class(*arguments)) or programs[-1])
    monkeypatch.setattr(FineTuning, "batches", watched)
    with monkeypatch.context() as patch:
        patch.setattr(FineTuningEvaluator, "run", stopped)
        with pytest.raises(KeyboardInterrupt):
            launch(config, tmp_path / "run")
    (program,) = programs
    assert program.train_step._cache_size() == 1  # of two trials
    worse, best = (tmp_path / f"run/runs/learning_rate={rate},epochs=5" for rate in ("1e-08", "0.003"))
    assert checkpoints.steps(best)[-1] == 60 and not (best / sweep.TRIAL_RESULT).exists()
    launch(config, tmp_path / "run", draw=page.draw)
    assert starts == [0, 0, 60] and read_metrics(best)[-1]["step"] == 60  # each trial once

    results = [json.loads((folder / sweep.TRIAL_RESULT).read_text()) for folder in (worse, best)]
    score = results[1]["scores"]["accuracy"]
    assert [result["failed"] for result in results] == [True, False] and score > 0.8
    assert checkpoints.steps(best) and not checkpoints.steps(worse)
    summary = (tmp_path / "run" / sweep.SUMMARY).read_text()
    assert summary.startswith(
        "| learning rate | epochs | accuracy, mean | best | standard deviation | runs | failed |\n"
    )
    assert f"| 0.003 | 5 | {100 * score:.2f} | {100 * score:.2f} |  | 1 | 0 |" in summary
    assert f"best: runs/{best.name}, accuracy" in summary
    source = pretrained.read_pretrained(tmp_path / "run")  # the folder of the sweep is read as its best run
    assert source.labels == ("0", "1") and source.path == f"{best}@60"
    drawn = (tmp_path / "run" / page.HTML_REPORT).read_text()  # with a row for each setting
    assert all(f"<td>run/{folder.name}</td>" in drawn for folder in (worse, best)) and "<td>accuracy " in drawn


@pytest.mark.slow
def test_another_sweep_reuses_finished_trials(checkpoint, tmp_path, monkeypatch):
    write_sst2(tmp_path, train=48)
    trained, workdir = [], tmp_path / "run"

    def run(kind, config, folder, *_, **more):
        trained.append(folder.name)
        opened = kind.open(config, folder, None)
        workdirs.write_info(folder, opened.info, opened.tokenizer)
        (folder / "checkpoints/1").mkdir(parents=True)
        return scored(0.6 + config.seed / 10)

    def search(text, **fields):
        launch(config_for(tmp_path, checkpoint, sweep=text, **fields), workdir)
        return [path.parent.name for path in workdir.glob("runs/*/checkpoints")]

    monkeypatch.setattr(sweep, "run_one", run)
    assert search("seed=0,1") == ["seed=1"] and trained == ["seed=0", "seed=1"]
    assert search("seed=2,0,1") == ["seed=2"] and trained[2:] == ["seed=2"]
    # A narrower sweep without the best trial does not change the best trial.
    assert search("epochs=5 seed=0") == ["seed=2"] and trained[3:] == ["epochs=5,seed=0"]
    assert (workdir / "best").read_text() == "runs/seed=2\n"
    with pytest.raises(UserError, match=r"seed=0: trained with other settings, max_seq_length = 24 \(was 32\); choose"):
        search("seed=0", max_seq_length=24)
    shutil.copytree(tmp_path / "SST-2", tmp_path / "other/SST-2")
    config = config_for(tmp_path / "other", checkpoint, sweep="seed=3")  # one best trial of two data sets
    with pytest.raises(UserError, match=r"seed=0: trained with other settings, data.path = .*; choose another"):
        launch(config, workdir)
    for text, folder, message in (
        ("", workdir, r"holds a sweep, and this is a single run; choose another --workdir"),
        ("seed=0", workdir / "runs/seed=2", r"holds a single run, and this is a sweep; choose another --workdir"),
    ):
        with pytest.raises(UserError, match=message):
            launch(config_for(tmp_path, checkpoint, sweep=text), folder)


def scored(score, metric="accuracy"):
    scores = Scores({metric: score}, score)
    return TrainingResult(None, scores, 1, scores)


def test_failed_trials_restart_and_stay_in_the_table(checkpoint, tmp_path, monkeypatch):
    write_sst2(tmp_path, train=48)
    seeds = []

    def run(kind, config, folder, *_, **more):
        seeds.append(config.seed)
        if config.seed < 1000:
            raise DivergenceError("the loss is no number")
        return scored(0.0 if config.seed < 2000 else 1.0)

    monkeypatch.setattr(sweep, "run_one", run)
    config = config_for(tmp_path, checkpoint, sweep="seed=5,2005,6", restarts=3)
    launch(config, tmp_path / "run")
    assert seeds == [5, 1005, 3005, 2005, 6, 1006, 2006]  # 2005 was planned anyway
    assert "| 42.86 | 100.00 | 53.45 | 7 | 4 |" in (tmp_path / "run" / sweep.SUMMARY).read_text()


def test_a_trial_with_a_nan_score_fails_without_ending_the_sweep(checkpoint, tmp_path, monkeypatch):
    """For example, the correlation of constant predictions is NaN."""
    scores = Scores({"accuracy": None}, None)
    monkeypatch.setattr(sweep, "run_one", lambda *_, **more: TrainingResult(None, scores, None, None))
    write_sst2(tmp_path, train=48)
    launch(config_for(tmp_path, checkpoint, sweep="seed=0"), tmp_path / "run")
    assert "| 0.00 | 0.00 |  | 1 | 1 |" in (tmp_path / "run" / sweep.SUMMARY).read_text()


@pytest.mark.parametrize(
    "search, programs",
    [("learning_rate=1e-5,1e-4 epochs=1,2 seed=0,1", 1), ("freeze_layers=0,1", 2),
     slow_case("class_weights=,1=9", 2), slow_case("weight_decay=0,0.1", 2),
     slow_case("hidden_dropout_prob=0,0.1", 2), slow_case("temperature=0.05,0.5", 2)],
)  # fmt: skip
def test_trials_share_a_program_unless_a_field_is_compiled_into_it(search, programs, checkpoint, tmp_path, monkeypatch):
    write_sst2(tmp_path, train=48)
    config = config_for(tmp_path, checkpoint)
    if "temperature" in search:  # embeddings, whose loss has fields
        config = experiments.load("embed")
        config.data.update(path=f"{tmp_path}/SST-2", form="scored", texts="sentence,sentence", label="label")
        config.init_checkpoint, config.max_seq_length = str(checkpoint), 32
    config.sweep, compiled = search, []

    def run(kind, config, folder, fit, **_):
        opened, program = fit(kind.open(config, folder, None))
        compiled.append(program)
        return scored(1.0, opened.task.data.metric)

    monkeypatch.setattr(sweep, "run_one", run)
    launch(config, tmp_path / "run")
    assert len(compiled) == len(sweep.parse_sweep(config)) and len(set(map(id, compiled))) == programs


def test_a_table_has_every_score():
    def rows(names, failed, *scores):
        table = sweep.format_results(
            [sweep.Result({"seed": 0}, scores_of_run, failed) for scores_of_run in scores], names
        )
        return table.splitlines()

    head, _, row = rows(("f1", "accuracy"), False, {"f1": 0.5, "accuracy": 0.9}, {"f1": 0.7, "accuracy": 0.6})
    columns = "mean | best | standard deviation"
    assert head == f"| f1, {columns} | accuracy, {columns} | runs | failed |"
    assert row == "| 60.00 | 70.00 | 14.14 | 75.00 | 90.00 | 21.21 | 2 | 0 |"
    *_, row = rows(("spearman",), True, {"spearman": None}, {"spearman": 0.5})  # None counts as zero
    assert row == "| 25.00 | 50.00 | 35.36 | 2 | 2 |"


@pytest.mark.parametrize(
    "scores, best",
    [([0.5, 0.7], "runs/b, f1 70.00"), ([0.7, 0.7], "runs/a, f1 70.00"), ([None, -0.1], "runs/b, f1 -10.00")],
)
def test_the_best_trial_keeps_the_checkpoint(tmp_path, scores, best):
    """Of two equal trials, the first keeps the checkpoint; a diverged trial is worse than any other."""
    for name, score in zip("ba" if scores[0] == scores[1] else "ab", scores):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
        (tmp_path / "runs" / name / sweep.TRIAL_RESULT).write_text(
            json.dumps({"scores": {"f1": score}, "failed": False})
        )
    assert sweep.keep_best(epath.Path(tmp_path), "f1") == f"best: {best}"
    kept = [path.parent.name for path in tmp_path.glob("runs/*/checkpoints")]
    assert kept == [best[5]] and (tmp_path / "best").read_text() == f"runs/{best[5]}\n"


@pytest.mark.parametrize("search, message", [
    ("batch_size=16,12", r"config.batch_size = 12: .* must be a multiple of the 8 devices"),
    ("class_weights=,earth=9", r"'earth' is not a label of the training data"),
])  # fmt: skip
def test_a_sweep_validates_all_trials_before_the_first(search, message, checkpoint, tmp_path):
    write_sst2(tmp_path, train=48)
    with pytest.raises(UserError, match=message):
        launch(config_for(tmp_path, checkpoint, sweep=search), tmp_path / "run")
    assert not (tmp_path / "run/runs").exists()


# A task that is defined outside of the package.


SEA = "ship sail harbour"  # two words with an s


@pytest.fixture(scope="module", autouse=True)
def registered():
    tasks.register("letter", own_task.TASK)
    yield
    del tasks.TASKS.registered["letter"]


def own_config(checkpoint, **fields):
    fields = dict(batch_size=32, epochs=6.0, max_seq_length=16, log_every_steps=4) | fields
    config = quick(fine_tuning_config("letter", letter="s"), "made up", checkpoint, **fields)
    config.checkpoint.keep = 3
    validate(config)
    return config


class LetterWithoutClass(own_task.Letter):
    """A task without a transformers class, which adopts the letter of an earlier run."""

    architecture = ""

    def adopt(self, config, settings):
        config.data.letter = settings.data.letter
        return [f"data.letter = {settings.data.letter!r}"]


def test_a_task_without_a_transformers_class_adopts_only_from_runs_of_the_task(checkpoint, monkeypatch):
    monkeypatch.setitem(tasks.TASKS.registered, "letter", LetterWithoutClass())
    config = own_config(checkpoint)
    assert not finetuning_run.resolve(config, None)[1], "a pre-trained checkpoint has no letter"
    settings = fine_tuning_config("letter", letter="t")
    monkeypatch.setattr("bertjax.interop.pretrained.read_settings", lambda path: ("", settings))
    resolved, decisions = finetuning_run.resolve(config, None)
    assert decisions == (f"from {checkpoint}: data.letter = 't'",) and resolved.data.letter == "t"


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """The workdir of a run that was stopped in its third epoch, and resumed."""
    folder = tmp_path_factory.mktemp("own") / "run"
    config = own_config(checkpoint)
    config.checkpoint.every_steps = 6
    launch_and_stop(FineTuning, config, folder, step=20)
    assert checkpoints.steps(folder)[-1] == 18
    launch(own_config(checkpoint), folder)
    return folder


@pytest.mark.slow
def test_a_workdir_is_read_at_the_best_checkpoint_by_default(trained, tmp_path):
    """Fine-tuning runs are read at the best checkpoint.

    Pre-training runs are read at the latest one, because scores at different lengths are not comparable.
    """
    assert max(line.get("eval/accuracy", 0) for line in read_metrics(trained)) > 0.9
    report = (trained / "report.txt").read_text()
    assert "accuracy" in report and "margin 0.25" in report
    steps, best = checkpoints.steps(trained), checkpoints.best_step(trained)
    shutil.copytree(trained, tmp_path / "run")
    first = steps[0]
    for step in (first, steps[-1]):
        score = 2.0 if step == first else 0.0
        checkpoints.write_scores(tmp_path / "run", step, Scores({"accuracy": score}, score, decided={}))
    assert len(steps) > 1 and pretrained.read_pretrained(trained).path == f"{trained}@{best}"
    for path, step in (("run", first), ("run@best", first), ("run@latest", steps[-1]), (f"run@{steps[-1]}", steps[-1])):
        assert pretrained.find(tmp_path / path).step == step
    chosen, other = (
        pretrained.read_pretrained(tmp_path / path).params["bert"]["pooler"] for path in ("run", "run@latest")
    )
    assert (chosen["dense"]["kernel"] != other["dense"]["kernel"]).any()
    info = workdirs.require_info(tmp_path / "run")
    workdirs.write_info(tmp_path / "run", dataclasses.replace(info, architecture=""), None)  # like a pre-training run
    assert pretrained.find(tmp_path / "run").step == steps[-1]
    with pytest.raises(
        UserError, match=rf"run@9: the run has no checkpoint of this step; choose one of the steps {first}, "
    ):
        pretrained.read_pretrained(tmp_path / "run@9")
    for step in steps:
        (tmp_path / f"run/checkpoints/{step}/scores.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"run@best: no checkpoint has a score; use @latest"):
        pretrained.read_pretrained(tmp_path / "run@best")
    with pytest.raises(UserError, match=r"@best needs the workdir of a run, and '.*nowhere' is not a workdir"):
        pretrained.read_pretrained(tmp_path / "nowhere@best")


@pytest.mark.slow
def test_more_epochs_extend_a_finished_run(trained, checkpoint, tmp_path, capsys, monkeypatch):
    """The longer run is stopped in its last evaluation, while the report of the shorter run still exists."""
    shutil.copytree(trained, tmp_path / "run")

    def extend() -> str:
        launch(own_config(checkpoint, epochs=7.0), tmp_path / "run")
        return capsys.readouterr().out

    launch(own_config(checkpoint), tmp_path / "run")
    assert capsys.readouterr().out.startswith("already finished: 48 steps")
    with monkeypatch.context() as patch:
        patch.setattr(FineTuningEvaluator, "run", lambda *_: os.kill(os.getpid(), signal.SIGINT) or stop())
        with pytest.raises(KeyboardInterrupt):
            extend()
    printed = capsys.readouterr().out
    assert "resuming with changed settings: epochs = 7.0 (was 6.0)" in printed and "from step 48" in printed
    assert checkpoints.steps(tmp_path / "run")[-1] == 56
    assert "already finished" not in extend()
    assert checkpoints.read_scores(tmp_path / "run", 56) is not None
    assert read_metrics(tmp_path / "run")[-1]["step"] == 56
    assert extend().startswith("already finished: 56 steps")


def stop():
    raise KeyboardInterrupt


def test_a_broken_entry_point_is_named_and_does_not_affect_other_tasks(monkeypatch):
    point = importlib.metadata.EntryPoint("theirs", "no.such.module:TASK", tasks.TASKS.group)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [point])
    with pytest.raises(UserError, match=r"task 'theirs': cannot load no.such.module:TASK, .*ModuleNotFoundError"):
        tasks.get("theirs")
    assert tasks.find_task({}, "BertModel") is None
    with pytest.raises(UserError, match=r"task 'glue' is a name of bertjax"):
        tasks.register("glue", own_task.TASK)


@pytest.mark.slow
def test_commands_load_a_task_by_entry_point(trained, tmp_path):
    """An installed package defines the entry point: predict runs in a separate process without registrations."""
    package = tmp_path / "site/own-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[bertjax.tasks]\nletter = tests.finetuning.own_task:TASK\n")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "site")])
    result = command("predict", f"--checkpoint={trained}", SEA, "wave net oven", cwd=tmp_path, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    expected = [{"text": SEA, "label": "with"}, {"text": "wave net oven", "label": "without"}]
    expected = [prediction | {"letter": "s", "margin": 0.25} for prediction in expected]
    assert [json.loads(line) for line in result.stdout.splitlines()] == expected
    result = command("predict", f"--checkpoint={trained}", SEA, cwd=tmp_path)  # without the package
    assert result.returncode == 1 and "error: config.task = 'letter': choose one of" in result.stderr


@pytest.mark.slow
def test_a_failed_restore_overwrites_nothing(trained, checkpoint, monkeypatch):
    def fails(*_):
        raise UserError("torn")

    before = (trained / "config.json").read_text()
    config = own_config(checkpoint, epochs=9.0)
    monkeypatch.setattr(checkpoints.Checkpoints, "restore", fails)
    with pytest.raises(UserError, match="torn"):
        launch(config, trained)
    assert (trained / "config.json").read_text() == before


def test_an_external_task_defines_the_sweep_of_its_paper(checkpoint):
    config = own_config(checkpoint, sweep="paper")
    assert sweep.parse_sweep(config) == [{"learning_rate": 1e-8}, {"learning_rate": 3e-3}]
