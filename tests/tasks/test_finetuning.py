"""Fine-tuning from files to scores, through the commands' own functions."""

import dataclasses
import json
import random
import re
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest

from bertjax.config import BertConfig, UserError, fine_tuning_config, pretraining_config
from bertjax.data.batches.examples import Examples
from bertjax.interop import conversion, pretrained
from bertjax.tasks import classification, classify, finetuning, finetuning_run, glue, output_layers, sweep, validate
from bertjax.tasks.launch import launch
from bertjax.tasks.pairs import encode_pairs
from bertjax.text.tokenizer import SPECIAL_PIECES, WordPiece
from bertjax.training.sinks.jsonl import read_metrics
from bertjax.training.workdir import require_info
from tests.conftest import TOPICS, one_device_mesh
from tests.processes import ROOT
from tests.processes import run as command
from tests.test_several_hosts import assert_same_run, finish, is_silent, start

pytestmark = pytest.mark.usefixtures("on_one_device")


def topic_rows(count: int, seed: int) -> list[tuple[str, str, str]]:
    """(text, other text, "1" where both are of one topic)."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        one, other = rng.choice(sorted(TOPICS)), rng.choice(sorted(TOPICS))
        other = one if rng.random() < 0.5 else other
        texts = [" ".join(rng.choices(TOPICS[topic], k=rng.randint(2, 9))) for topic in (one, other)]
        rows.append((*texts, str(int(one == other))))
    return rows


def write_lines(path, *lines: str) -> None:
    path.write_text("\n".join(lines) + "\n")


def write_sst2(folder, train=300, dev=45):
    """Files as SST-2's; positive is what is about the sea."""
    for name, count, seed in (("train", train, 0), ("dev", dev, 1)):
        rows = [(a, str(int(a.split()[0] in TOPICS["sea"]))) for a, _, _ in topic_rows(count, seed)]
        (folder / "SST-2").mkdir(exist_ok=True)
        write_lines(folder / f"SST-2/{name}.tsv", "sentence\tlabel", *map("\t".join, rows))


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
    """(folder of the data, workdir of a finished run on it)."""
    folder = tmp_path_factory.mktemp("glue")
    write_sst2(folder)
    run(config_for(folder, checkpoint), folder / "run")
    return folder, folder / "run"


def test_a_task_is_learnt_and_scored(tuned):
    _, workdir = tuned
    lines = read_metrics(workdir)
    scored = [line for line in lines if "eval/accuracy" in line]
    assert [line["step"] for line in scored] == [19, 38, 57, 76]  # after every epoch of 19 steps
    assert scored[-1]["eval/accuracy"] > 0.9
    best, last = (100 * score for score in (max(x["eval/accuracy"] for x in scored), scored[-1]["eval/accuracy"]))
    report = (workdir / "report.txt").read_text()  # of the best step, and of the last where that is another one
    assert report.startswith(f"dev: accuracy {best:.2f}") and report.endswith(f"dev: accuracy {last:.2f}\n")


def test_a_finished_run_says_so(tuned, checkpoint, capsys):
    folder, workdir = tuned
    run(config_for(folder, checkpoint, log_every_steps=7, seed=3), workdir)
    said = capsys.readouterr().out
    assert said.startswith(f"already finished: 76 steps, in {workdir}\ndev: accuracy") and "seed = 3 (was 0)" in said
    with pytest.raises(UserError, match=r"is at step 76, past the config's 38; choose another --workdir"):
        run(config_for(folder, checkpoint, epochs=2.0), workdir)
    with pytest.raises(UserError, match=r"config.data.name = 'cola': .* holds a run with 'sst2'"):
        run(config_for(folder, checkpoint, name="cola"), workdir)


@pytest.mark.parametrize("changes, message", [
    (dict(input_ids=[np.array([2, 5, 100])]), "has 100 as token id, which must be from 0 to 99"),
    (dict(token_types=[np.array([0, 0, 2])]), "has 2 as token type, which must be from 0 to 1"),
    (dict(labels=np.array([3])), "has 3 as label, which must be from 0 to 2"),
    (dict(labels=[np.array([-1, 0, 5])], per_token=True), "has 5 as label"),
])  # fmt: skip
def test_what_no_table_has_a_row_for_is_named_before_it_is_nan(changes, message):
    model = BertConfig(vocab_size=100, type_vocab_size=1)
    fine = Examples([np.array([2, 5, 3])], [np.array([0, 0, 1])], np.array([2]))
    finetuning.check_indices(fine, ("a", "b", "c"), model)
    with pytest.raises(UserError, match=message):
        finetuning.check_indices(dataclasses.replace(fine, **changes), ("a", "b", "c"), model)


def test_data_that_changed_is_named_and_never_mixed(tuned, checkpoint, tmp_path, capsys):
    """Labels swapped, as many rows: a finished run says it, a longer one and a search refuse it."""
    shutil.copytree(tuned[0], tmp_path / "moved")
    shutil.copytree(tuned[1], tmp_path / "run")
    config, train = config_for(tmp_path / "moved", checkpoint), tmp_path / "moved/SST-2/train.tsv"
    run(config, tmp_path / "run")
    assert "no longer" not in capsys.readouterr().out, "a folder may be moved"
    train.write_text(train.read_text().translate({ord("0"): "1", ord("1"): "0"}))
    run(config, tmp_path / "run")
    assert "the data is no longer that of this run: SST-2/train.tsv has changed" in capsys.readouterr().out
    config.epochs = 5.0
    with pytest.raises(UserError, match=r"holds a run on other data \(SST-2/train.tsv changed\), and would mix both"):
        run(config, tmp_path / "run")
    material = finetuning_run.load_material(config, tmp_path / "run", require_info(tmp_path / "run"))
    (tmp_path / "search/runs").mkdir(parents=True)
    (tmp_path / "run").rename(tmp_path / "search/runs/seed=0")
    config.sweep = "seed=0"
    with pytest.raises(UserError, match=r"SST-2/train.tsv changed"):
        sweep.check_others(tmp_path / "search", config, material)


def test_what_was_learnt_is_used_and_exported(tuned, tmp_path):
    """The same dev predictions from the workdir, and from its export to Hugging Face's format."""
    folder, workdir = tuned
    source, (_, *lines) = pretrained.read(workdir), (folder / "SST-2/dev.tsv").read_text().splitlines()
    texts, labels = zip(*(line.split("\t") for line in lines))
    conversion.convert(workdir, tmp_path / "hf", "huggingface")
    fields = json.loads((tmp_path / "hf/config.json").read_text())
    assert fields["architectures"] == ["BertForSequenceClassification"] and fields["id2label"] == {"0": "0", "1": "1"}
    guesses, exported = (
        list(classification.predict(each, [(text,) for text in texts]))
        for each in (source, pretrained.read(tmp_path / "hf"))
    )
    assert guesses == exported
    right = np.mean([guess["label"] == label for guess, label in zip(guesses, labels)])
    assert right == max(line.get("eval/accuracy", 0) for line in read_metrics(workdir))  # the best, not the latest
    assert all(abs(sum(guess["probabilities"].values()) - 1) < 1e-5 for guess in guesses)
    scores = finetuning_run.score(source, *glue.labelled(source, folder / "SST-2/dev.tsv"))
    assert scores.scores == source.scores and finetuning_run.report(scores, "dev.tsv").startswith("dev.tsv: accuracy ")


def test_a_checkpoint_predicts_in_the_type_of_its_run_or_a_given_one(tuned):
    ids = tokenizer().encode_ids(["ship sail wave", "bread oven butter knife"])
    examples, logits = Examples(ids, [np.zeros_like(x) for x in ids]), {}
    for dtype in ("", "float32", "bfloat16"):
        source = pretrained.read_with_tokenizer(tuned[1], *filter(None, [dtype]))
        logits[dtype] = np.array(output_layers.predict(output_layers.classification(2), source, examples))
    assert (logits[""] == logits["float32"]).all()
    difference = np.linalg.norm(logits["bfloat16"] - logits[""]) / np.linalg.norm(logits[""])
    assert 1e-6 < difference < 2e-2


def test_a_checkpoint_decides_its_model(tuned, checkpoint):
    config = config_for(tuned[0], checkpoint, max_seq_length=128)
    with pytest.raises(UserError, match=r"config.max_seq_length = 128: .* has 64 positions only; set"):
        finetuning_run.adopt(config, None)
    config.max_seq_length, config.model.hidden_size = 64, 96
    with pytest.raises(UserError, match=r"config.model.hidden_size = 96: the run in this workdir has 32; leave it out"):
        run(config, tuned[1])


@pytest.mark.slow
def test_two_hosts_learn_and_score_as_one(checkpoint, tmp_path):
    """No example of the dev set is lost or counted twice between them, and a search finds the same best run."""
    write_sst2(tmp_path, train=96)
    run(config_for(tmp_path, checkpoint, epochs=1.0), tmp_path / "alone")
    fields = ["batch_size=16", "max_seq_length=32", "log_every_steps=5", "epochs=1", "dtype=float32",
              "model.hidden_dropout_prob=0.0", "model.attention_probs_dropout_prob=0.0", f"data.path={tmp_path}",
              f"init_checkpoint={checkpoint}", "sweep=learning_rate=1e-9,3e-3"]  # fmt: skip
    experiment = f"--config={ROOT}/experiments/glue.py:sst2"
    flags = [experiment, f"--workdir={tmp_path / 'two'}", *(f"--config.{field}" for field in fields)]
    first, second = finish(start(2, *flags))
    assert first[0] == second[0] == 0, (first[2] + second[2])[-3000:]
    assert is_silent(second[1]), second[1]  # one host speaks
    results = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("two/runs/*/result.json")}
    best = max(results, key=lambda name: results[name]["scores"]["accuracy"])
    assert len(results) == 2 and (tmp_path / "two/best").read_text() == f"runs/{best}\n"
    assert_same_run(tmp_path / "two/runs/learning_rate=0.003", tmp_path / "alone")


def test_an_output_layer_for_something_else_is_not_taken_over(tuned, tmp_path, capsys):
    """Two labels here, two labels there, and yet others."""
    config = config_for(tuned[0], tuned[1])
    finetuning_run.adopt(config, None)
    opened = finetuning_run.open_run(config, tmp_path, None)
    opened.initialize(nn.meta.unbox(jax.jit(opened.task.init_params)(jax.random.key(0))))
    said = capsys.readouterr().out
    assert "left fresh: classifier/dense/bias, classifier/dense/kernel; not used: classifier/dense/bias, classi" in said


def test_predict_prints_json_lines_and_writes_submissions(tuned, tmp_path):
    _, workdir = tuned
    (tmp_path / "texts.txt").write_bytes(b"\xef\xbb\xbfrose spade\r\n\r\nanchor whale net\r\n")  # as on Windows
    result = command("predict", f"--checkpoint={workdir}", "--input=texts.txt", "ship sail", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["text"], line["label"]) for line in found] == [
        ("ship sail", "1"), ("rose spade", "0"), ("anchor whale net", "1")
    ]  # fmt: skip
    assert all(line["probabilities"][line["label"]] > 0.5 for line in found)

    (tmp_path / "test.tsv").write_text("index\tsentence\n7\tship sail\n9\trose spade\n")
    result = command("submit", f"--checkpoint={workdir}", "--input=test.tsv", "--output=SST-2.tsv", cwd=tmp_path)
    assert result.stdout == "2 predictions in SST-2.tsv\n", result.stderr
    assert (tmp_path / "SST-2.tsv").read_text() == "index\tprediction\n7\t1\n9\t0\n"

    result = command("predict", f"--checkpoint={workdir}", "--top_k=3", "ship", cwd=tmp_path)
    assert re.fullmatch(rf"error: --top_k=3: {workdir}\S* is fine-tuned, and predicts no words\n", result.stderr)
    result = command("predict", f"--checkpoint={workdir}", "ship ||| sail ||| net", cwd=tmp_path)
    message = "error: 'ship ||| sail ||| net': this checkpoint expects texts, or pairs as \"A ||| B\""
    assert result.returncode == 1 and result.stderr.startswith(message)


def tokenizer():
    words = [word for words in TOPICS.values() for word in words]
    return WordPiece([*SPECIAL_PIECES, *words], lowercase=True)


def test_pairs_are_cut_as_google_cuts_them():
    pieces, rng = tokenizer(), random.Random(0)
    firsts, seconds = ([rng.choices(range(5, 45), k=rng.randint(1, 30)) for _ in range(200)] for _ in range(2))
    texts = [[" ".join(pieces.pieces[i] for i in ids) for ids in side] for side in (firsts, seconds)]
    for length in (8, 13, 20, 64):
        ids, types, cut = encode_pairs(pieces, *texts, length)
        for row, (a, b) in enumerate(zip(firsts, seconds)):
            short_a, short_b = list(a), list(b)
            while len(short_a) + len(short_b) > length - 3:
                (short_a if len(short_a) > len(short_b) else short_b).pop()
            assert ids[row].tolist() == [pieces.cls_id, *short_a, pieces.sep_id, *short_b, pieces.sep_id]
            assert types[row].tolist() == [0] * (len(short_a) + 2) + [1] * (len(short_b) + 1)
            assert cut[row] == (len(a) + len(b) > length - 3)
    ids, types, cut = encode_pairs(pieces, ["ship sail harbour wave"], None, 5)
    assert len(ids[0]) == 5 and ids[0][-1] == pieces.sep_id and cut == [True] and not types[0].any()


@pytest.mark.parametrize("name, rows, message", [
    ("sst2", "sentence\tlabel\nship\t2\n", r"train.tsv:2: unknown label '2'; expected one of 0, 1"),
    ("sst2", "sentence\tlabels\nship\t1\n", r"train.tsv:2: no column 'label'; there are sentence, labels"),
    ("sst2", "sentence\tlabel\nship\t1\textra\n", r"train.tsv:2: 3 columns, expected 2: sentence, label"),
    ("sst2", "sentence\tlabel\n", r"train.tsv: no example in it"),
    ("sst2", "", r"train.tsv: no example in it"),
    ("stsb", "sentence1\tsentence2\tscore\nship\tsail\tmuch\n", r"train.tsv:2: score is 'much', expected a number"),
])  # fmt: skip
def test_what_is_wrong_in_a_file_is_said_with_its_place(checkpoint, tmp_path, name, rows, message):
    for file in ("train.tsv", "dev.tsv"):
        (tmp_path / file).write_text(rows)
    with pytest.raises(UserError, match=message):
        glue.load(config_for(tmp_path, checkpoint, name), tokenizer())


# Folder: the header of its files, if they have one; two training rows; one row of dev, and one of MNLI's other dev set.
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
# Task: names of the labels, the training rows' labels, the first of them as it is read; of each dev set a score, the
# text and its label.
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


@pytest.fixture
def glue_folder(tmp_path):
    """Columns in the order of the distribution, and a quotation mark that quotes nothing."""
    for folder, (header, train, dev, *others) in GLUE.items():
        (tmp_path / folder).mkdir()
        files = {"train": train, "dev": [dev], "dev_matched": [dev], "dev_mismatched": others}
        for file, rows in files.items():
            write_lines(tmp_path / folder / f"{file}.tsv", *([header] if header else []), *rows)
    (tmp_path / "MNLI/diagnostic-full.tsv").write_text("Premise\tHypothesis\tLabel\nstorm\twave\tcontradiction\n")
    return tmp_path


@pytest.mark.parametrize("name", GLUE_AS_READ)
def test_every_task_of_glue_reads_its_own_files(glue_folder, name):
    config, pieces = fine_tuning_config("glue", name=name), tokenizer()
    config.data.path = str(glue_folder)
    dataset = glue.load(config, pieces)
    names, labels, first, dev = GLUE_AS_READ[name]

    def text(examples):
        return " ".join(pieces.pieces[i] for i in examples.input_ids[0])

    assert dataset.labels == tuple(names.split()) and dataset.train.labels.tolist() == labels
    assert text(dataset.train) == first
    assert [(text(split.examples), *split.examples.labels.tolist()) for split in dataset.dev] == [x[1:] for x in dev]
    for split, (score, _, label) in zip(dataset.dev, dev):
        logits = [np.eye(3)[label] if names else np.array([label])]
        assert score in split.score(logits) and (score != "accuracy" or split.score(logits)[score] == 1)
    if name == "qqp":
        assert dataset.notes[0] == "1 lines with a wrong number of columns dropped"


def table_config(folder, **fields):
    config = fine_tuning_config(
        "classify", **dict(text="text", second_text="", label="label", is_number=False) | fields
    )
    config.data.path = str(folder)
    return config


def test_tables_of_the_users_own(tmp_path):
    config = table_config(tmp_path, text="a", second_text="b", label="same")
    (tmp_path / "train.csv").write_text('a,b,same\n"ship, sail",wave,yes\nrose,judge,no\n')
    (tmp_path / "dev.csv").write_text('a,b,same\nship,"oven\nbread",no\n')
    dataset = classify.load(config, tokenizer())
    assert dataset.labels == ("no", "yes") and dataset.train.labels.tolist() == [1, 0]
    assert dataset.dev[0].score([np.array([1.0, 0.0])]) == {"accuracy": 1.0, "macro_f1": 1.0}
    for cell, message in (("maybe", "unknown label 'maybe'; expected one of no, yes"), ("", "same is empty; remove")):
        (tmp_path / "dev.csv").write_text(f"a,b,same\nship,oven,{cell}\n")
        with pytest.raises(UserError, match="dev.csv:2: " + message):
            classify.load(config, tokenizer())
    (tmp_path / "dev.csv").unlink()
    with pytest.raises(UserError, match=r"no dev.csv, dev.tsv or dev.jsonl in it"):
        classify.load(config, tokenizer())
    (tmp_path / "train.csv").unlink()
    for name in ("train", "dev"):
        rows = [json.dumps({"a": a, "b": b, "same": int(s)}) for a, b, s in topic_rows(40, seed=3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    config.data.is_number = True
    dataset = classify.load(config, tokenizer())
    assert dataset.labels == () and dataset.train.labels.dtype == float and dataset.metric == "spearman"
    (tmp_path / "dev.jsonl").write_text(json.dumps({"a": None, "b": "ship", "same": 1}) + "\n")
    with pytest.raises(UserError, match=r"dev.jsonl:1: a is null"):
        classify.load(config, tokenizer())


def labelled(folder, rows, suffix="jsonl", dev=None, **fields):
    """`classify` of (text, label) in both files."""
    for name, content in (("train", rows), ("dev", dev or rows)):
        if suffix == "jsonl":
            text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in content)
        else:
            text = "text,label\n" + "".join(f'{text},"{label}"\n' for text, label in content)
        (folder / f"{name}.{suffix}").write_text(text)
    return classify.load(table_config(folder, **fields), tokenizer())


def test_labels_that_are_written_in_two_ways_are_one_or_refused(tmp_path):
    assert labelled(tmp_path, [("ship", "pos"), ("rose", "neg "), ("oven", " pos")]).labels == ("neg", "pos")
    assert labelled(tmp_path, [("ship", 1), ("rose", 0.0), ("oven", 1.0), ("net", "1")]).labels == ("0", "1")
    assert labelled(tmp_path, [("ship", True), ("rose", False)]).labels == ("false", "true")
    assert labelled(tmp_path, [("ship", "[OTHER]"), ("rose", "(a)")]).labels == ("(a)", "[OTHER]")
    for one, other, message in (
        ("1.0", "1", r"train.jsonl:2: label is '1', but '1.0' at .*train.jsonl:1; write both in one way"),
        (True, 1, r"train.jsonl:2: label is '1', but 'true'"),
        ("True", True, r"but 'True'"),
        ("caf\u00e9", "cafe\u0301", r"train.jsonl:2: label is"),
        ("pos", "pos\ufeff", r"train.jsonl:2: label is"),
    ):
        with pytest.raises(UserError, match=message):
            labelled(tmp_path, [("ship", one), ("rose", other)])
    scores = [("ship", f"{number / 8}") for number in range(20)]
    with pytest.raises(UserError, match=r"config.data.is_number = False: label has 20 different numbers, such as 0.1"):
        labelled(tmp_path, scores)
    with pytest.raises(UserError, match=r"dev.jsonl:1: unknown label 'no'; expected one of a, .*, l and 8 more labels"):
        labelled(tmp_path, [("ship", letter) for letter in "abcdefghijklmnopqrst"], dev=[("ship", "no")])


@pytest.mark.parametrize("label, message", [
    (["toxic", "insult"], r"train.jsonl:2: label is a list, .* set config.data.multi_label=list"),
    ([1, 0, 1], r"label is a list"),
    ({"toxic": 1}, r"label is an object"),
    ("['toxic', 'insult']", r"label is a list"),
    ("[1 0 1]", r"label is a list"),
    (None, r"train.jsonl:2: label is null; remove rows without a label"),
    ("  ", r"label is empty"),
    ("nan", r"label is 'nan', which stands for no value"),
])  # fmt: skip
def test_what_is_no_label_is_refused(tmp_path, label, message):
    for suffix in ("jsonl", "csv") if isinstance(label, str) else ("jsonl",):
        (tmp_path / suffix).mkdir()
        with pytest.raises(UserError, match=message):
            labelled(tmp_path / suffix, [("ship", "a"), ("rose", label), ("oven", "b")], suffix)


@pytest.mark.parametrize("label", ["nan", "Infinity", "1_000", "1e39", "1,5", True, "much"])
def test_what_is_no_number_is_refused(tmp_path, label):
    with pytest.raises(UserError, match=r"train.jsonl:2: label is '.*', expected a number"):
        labelled(tmp_path, [("ship", 1), ("rose", label)], is_number=True)
    found = labelled(tmp_path, [("ship", 1), ("rose", " -2.5e-1 ")], is_number=True)
    assert found.train.labels.tolist() == [1, -0.25]


def test_dev_texts_of_the_training_data_are_counted(tmp_path):
    rows = [("ship", "a"), ("rose", "b"), ("oven", "a")]
    notes = labelled(tmp_path, rows, dev=[("rose", "a"), ("net", "b"), ("ship", "a")]).notes
    assert "2 of 3 dev texts are also in the training data" in notes
    assert not any("also in" in note for note in labelled(tmp_path, rows, dev=[("net", "a")]).notes)


@pytest.mark.parametrize("packing", [False, True])
def test_a_report_plans_no_epoch_after_the_next(tuned, checkpoint, monkeypatch, packing):
    config = config_for(tuned[0], checkpoint, epochs=40.0)
    finetuning_run.adopt(config, None)
    config.packing = packing
    dataset = glue.load(config, pretrained.read_tokenizer(checkpoint))
    task = finetuning.FineTuning(config, one_device_mesh(config), dataset)
    order, planned = task._order, []
    shape, size = order.shape, order.steps_per_epoch
    monkeypatch.setattr(order, "shape", lambda step: planned.append(step) or shape(step))
    exact = [task.dataset.output_layer.flops(task.model, *shape(step)) for step in range(2 * size)]
    assert task.flops(0, 2 * size) == sum(exact) and task.flops(size - 3, size + 2) == sum(exact[size - 3 : size + 2])
    assert task.flops(3, task.total_steps) == pytest.approx(sum(exact) * 20, rel=0.1)
    assert max(planned) < 2 * size and len(planned) == 2 * size and task.flops(5, 5) == 0


def test_a_workdir_is_not_continued_with_what_does_not_fit_it(tuned, checkpoint, tmp_path):
    """Another command's config, a vocabulary that is too large."""
    folder, workdir = tuned
    other, config = pretraining_config(), config_for(folder, checkpoint)
    other.data.corpus, other.init_checkpoint = str(folder / "test.tsv"), str(checkpoint)
    with pytest.raises(UserError, match=r"config.task = 'pretraining': .* holds a run with 'glue'; choose another"):
        launch(other, workdir)
    WordPiece([*SPECIAL_PIECES, *(f"word{i}" for i in range(500))], lowercase=True).save(tmp_path)
    config.tokenizer.path = str(tmp_path / "vocab.txt")
    with pytest.raises(UserError, match=r"config.tokenizer.path = .*: 505 pieces, but the model has"):
        launch(config, tmp_path / "other")
