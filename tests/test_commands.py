"""The commands as a stranger uses them: from text to filled masks, and what happens when something is wrong."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from bertjax.__main__ import COMMANDS
from bertjax.sharding.topology import has_accelerator
from tests.conftest import make_corpus
from tests.interop.test_golden import GOLDEN
from tests.processes import ROOT, environment_with, run, start

# Small enough to train in seconds.
TINY = [
    "--config.data.heldout_fraction=0.15", "--config.data.dupe_factor=2", "--config.model.vocab_size=150",
    "--config.model.hidden_size=32", "--config.model.num_attention_heads=2", "--config.model.num_hidden_layers=2",
    "--config.model.intermediate_size=64", "--config.batch_size=16", "--config.mesh.data=1",
    "--config.stages.short.steps=6", "--config.stages.short.length=32", "--config.stages.long.steps=4",
    "--config.stages.long.length=64",
    "--config.stages.long.max_predictions_per_seq=10", "--config.log_every_steps=2", "--config.eval.max_sequences=32",
]  # fmt: skip


def base(*arguments):
    return [f"--config={ROOT / 'experiments' / 'base.py'}", *arguments]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which `main` went from text to a finished run."""
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "text.txt").write_text(make_corpus(80))
    result = run("main", *base("--config.data.corpus=text.txt", "--workdir=run", *TINY), cwd=folder, fresh=True)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_main_goes_from_text_to_filled_masks(trained):
    folder, result = trained
    assert "held-out masked words: loss" in result.stdout and "unigram baseline" in result.stdout
    assert "the man went to the [MASK] to buy a [MASK] of milk" in result.stdout
    assert "step 10/10 loss" in result.stdout
    assert "config.optimizer.warmup_steps = 10000: the 10 steps end before the warm-up does" in result.stdout
    names = {path.name for path in (folder / "run").iterdir()}
    assert names >= {"config.json", "vocab.txt", "records", "checkpoints", "metrics.jsonl", "tensorboard", "report.txt"}
    assert names >= {"report.html", "report.png"}
    assert not list((folder / "run").rglob("*.partial"))


@pytest.mark.slow
def test_a_finished_run_says_so_at_once(trained):
    folder, result = trained
    again = run("main", *base("--config.data.corpus=text.txt", "--workdir=run", *TINY), cwd=folder)
    assert again.returncode == 0 and again.stdout.startswith("already finished: 10 steps")
    assert again.stdout.split("\n")[1:] == result.stdout.split("\n")[-len(again.stdout.split("\n")) + 1 :]


@pytest.mark.slow
def test_predict_fills_masks_as_text_and_as_json(trained):
    folder, _ = trained
    (folder / "texts.txt").write_text("the [MASK] saw the [MASK] .\n\na [MASK]\n")
    plain = run("predict", "--checkpoint=run", "--top_k=3", "the [MASK] stayed .", cwd=folder)
    assert plain.returncode == 0, plain.stderr
    first, second = plain.stdout.splitlines()
    assert first == "the [MASK] stayed ." and second.startswith("  [MASK] 1: ") and second.count("%") == 3
    result = run("predict", "--checkpoint=run", "--json", "--input=texts.txt", cwd=folder)
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [len(o["masks"]) for o in objects] == [2, 1]
    assert len(objects[0]["masks"][0]) == 5 and 0 < objects[0]["masks"][0][0]["probability"] <= 1


def test_evaluate_counts_minimal_pairs(trained):
    folder, _ = trained
    pairs = [
        (f"the ship saw the {word} .", f"ship the saw {word} the .", f"x{i % 2}") for i, word in enumerate("ab cd")
    ]
    lines = [json.dumps({"good": good, "bad": bad, "paradigm": kind}) for good, bad, kind in pairs]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    plain = run("evaluate", "--checkpoint=run", "--pairs=pairs.jsonl", cwd=folder)
    assert plain.returncode == 0 and "% of 3" in plain.stdout and "in 5 pairs" not in plain.stdout, plain.stderr
    assert "of 5 pairs (chance: 50 %)" in plain.stdout
    found = json.loads(
        run("evaluate", "--checkpoint=run", "--pairs=pairs.jsonl", "--most=1", "--json", cwd=folder).stdout
    )
    assert found["pairs"] == 2 and found["paradigms"].keys() == {"x0", "x1"}
    assert found["share"] == sum(found["paradigms"].values()) / 2
    missing = run("evaluate", "--checkpoint=run", "--pairs=none.jsonl", cwd=folder)
    assert missing.returncode == 1 and missing.stderr == "error: --pairs: no file 'none.jsonl'\n"


@pytest.mark.slow
@pytest.mark.skipif(has_accelerator(), reason="there JAX looks for it")
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="pip install -e '.[aot]'")
def test_jax_is_not_asked_for_a_tpu_where_there_is_none(trained):
    """Nor does libtpu print its errors before a command's own output."""
    folder, _ = trained
    environment = {name: value for name, value in environment_with().items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "bertjax.predict", "--checkpoint=run", "the [MASK] stayed ."]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.startswith("the [MASK] stayed .")
    assert result.stderr == ""


def test_prepare_and_vocabulary_make_what_main_trains_on(trained, tmp_path):
    folder, _ = trained
    corpus = f"--config.data.corpus={folder}/text.txt"
    learnt = run("vocabulary", *base(corpus, "--output=words", *TINY), cwd=tmp_path)
    assert learnt.returncode == 0 and "learnt 150 pieces" in learnt.stdout, learnt.stderr
    assert (tmp_path / "words" / "vocab.txt").read_text() == (folder / "run" / "vocab.txt").read_text()
    words = "--config.tokenizer.path=words/vocab.txt"
    arguments = base(corpus, words, "--output=out", "--workers=1", *TINY)
    prepared = run("prepare", *arguments, cwd=tmp_path, fresh=True)
    assert prepared.returncode == 0 and "--config.data.records=out" in prepared.stdout, prepared.stderr
    ours, its = tmp_path / "out", folder / "run" / "records"
    files = [path.relative_to(its) for path in its.rglob("*.tfrecord")]
    assert files and all((ours / f).read_bytes() == (its / f).read_bytes() for f in files)


def test_ctrl_c_saves_and_the_same_command_goes_on(trained, tmp_path):
    folder, _ = trained
    arguments = base(f"--config.data.records={folder}/run/records", "--workdir=stopped", *TINY,
                     "--config.stages.short.steps=100000", "--config.log_every_steps=1")  # fmt: skip
    process = start("main", *arguments, cwd=tmp_path, fresh=True)
    while "\nstep 3/" not in process.stdout:
        assert process.poll() is None, process.describe()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, process.describe()
    errors = process.stderr
    assert errors.startswith("error: stopped at step") and errors.count("\n") == 1  # no last words of TensorFlow's
    steps = sorted(int(path.name) for path in (tmp_path / "stopped" / "checkpoints").iterdir())
    assert steps and 3 <= steps[-1] < 1000


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_prepare_stops_at_once_and_keeps_what_is_finished(number, tmp_path):
    (tmp_path / "text.txt").write_text(20 * make_corpus(2_000))
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the"]))
    arguments = base("--config.data.corpus=text.txt", "--output=out", "--workers=2", *TINY)
    arguments += ["--config.model.vocab_size=6", "--config.tokenizer.path=vocab.txt", "--config.data.dupe_factor=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bertjax.prepare", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment_with(),
        start_new_session=True,
    )
    while not list((tmp_path / "out").glob("unfinished/*/[!c]*")):  # beside corpus-...: the workers are at work
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, errors = process.communicate(timeout=300)  # closed by all who hold it: no worker is left
    assert process.returncode == 130 and errors.startswith("error: ") and errors.count("\n") == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"vocab.txt", "unfinished"}


def test_a_finished_run_tells_which_settings_it_was_not_trained_with(trained):
    folder, _ = trained
    again = run("main", *base("--config.data.corpus=text.txt", "--workdir=run", *TINY, "--config.seed=5"), cwd=folder)
    assert "this run was trained with other settings: seed = 5 (was 0)" in again.stdout


def test_convert_there_and_back_and_predict_from_it(trained, tmp_path):
    folder, _ = trained
    run_folder = folder / "run"
    for source, output, form in (
        (run_folder, "hf", "huggingface"),
        ("hf", "google", "tf1"),
        ("google", "b", "bertjax"),
    ):
        result = run("convert", f"--source={source}", f"--output={output}", f"--format={form}", cwd=tmp_path)
        assert result.returncode == 0 and f"-> {form}: " in result.stdout, result.stderr
    before, after = (
        run("predict", f"--checkpoint={path}", "the [MASK] saw the ship .", cwd=tmp_path) for path in (run_folder, "b")
    )
    assert before.stdout == after.stdout and "[MASK] 1: " in after.stdout, after.stderr
    again = run("convert", "--source=hf", "--output=hf", "--format=tf1", cwd=tmp_path)
    assert again.returncode != 0 and "error: --output=hf: exists and is not empty" in again.stderr


@pytest.mark.slow
def test_main_starts_from_a_checkpoint_that_may_then_go(trained, tmp_path):
    folder, _ = trained
    assert run("convert", f"--source={folder}/run", "--output=hf", "--format=huggingface", cwd=tmp_path).returncode == 0
    arguments = base(f"--config.data.records={folder}/run/records", "--config.init_checkpoint=hf", "--workdir=w", *TINY,
                     "--config.model.max_position_embeddings=512")  # fmt: skip
    first = run("main", *arguments, cwd=tmp_path)
    assert "started from hf (huggingface): 26 of 26 arrays loaded" in first.stdout, first.stderr
    shutil.rmtree(tmp_path / "hf")
    again = run("main", *arguments, cwd=tmp_path)
    assert again.returncode == 0 and "already finished: 10 steps" in again.stdout, again.stderr
    longer = run("main", *arguments, "--config.stages.long.steps=5", cwd=tmp_path)
    assert longer.returncode == 0 and "step 11/11" in longer.stdout, longer.stderr


@pytest.mark.slow
def test_extract_writes_hidden_states(trained, tmp_path):
    folder, _ = trained
    arguments = f"--checkpoint={folder}/run", "--layers=sum_all", "--output=f.npz", "the ship", "a", "--dtype=float32"
    result = run("extract", *arguments, cwd=tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"))
    assert list((tmp_path / "compiled").iterdir())  # for the next time
    assert result.returncode == 0 and "hidden [7, 32] of 2 texts" in result.stdout, result.stderr
    with np.load(tmp_path / "f.npz") as arrays:
        exact = arrays["hidden"]
        assert exact.shape == (7, 32) and arrays["offsets"].tolist() == [0, 4, 7]
    assert run("extract", *arguments[:-1], "--dtype=bfloat16", cwd=tmp_path).returncode == 0
    with np.load(tmp_path / "f.npz") as arrays:
        rounded = arrays["hidden"]
    assert 1e-6 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 1e-2


def test_report_looks_into_a_run(trained, tmp_path):
    folder, _ = trained
    result = run("report", "run", f"--output={tmp_path}", "--text=the ship saw the oven .", cwd=folder)
    assert result.returncode == 0 and result.stdout == f"{tmp_path}/report.html\n", result.stderr
    page = (tmp_path / "report.html").read_text()
    assert "Attention, head by head" in page and "Nearest word embeddings" in page and page.count("<img") == 2
    own = (folder / "run/report.html").read_text()
    assert "Attention, head by head" not in own and '<a href="checkpoints/10">run@10</a>' in own
    for arguments, message in (
        ((), "error: name the workdirs of one or more runs"),
        (("run", "run"), "error: --output: say in which folder to write about several runs"),
        (
            ("run", "run", f"--output={tmp_path}", "--text=a"),
            "error: --text: of one run only; of 2 runs, their curves are drawn",
        ),
        (("nowhere",), "error: no checkpoint in 'nowhere': give the workdir of a run, a Hugging Face folder "
         "(config.json and model.safetensors), hub:NAME for one of the hub, or Google's bert_model.ckpt"),
        (("run", "nowhere", f"--output={tmp_path}"),
         "error: no nowhere/config.json: 'nowhere' is not the workdir of a run"),
        (("run@7",), "error: run@7: no such checkpoint; there are 10"),
        ((str(GOLDEN),), f"error: --output: say in which folder to write about {GOLDEN}"),
        ((".",), "error: .: no run, and runs/ in it has no finished trial of a search"),
        ((".", "--words=a"), "error: --words: . has no checkpoint to look into; a search's are in runs/"),
    ):  # fmt: skip
        (folder / "runs").mkdir(exist_ok=True)
        result = run("report", *arguments, cwd=folder)
        assert result.returncode == 1 and result.stderr == f"{message}\n"


@pytest.mark.slow
@pytest.mark.parametrize("source, has_curves", [("run@10", True), (str(GOLDEN), False)])
def test_report_looks_into_a_step_of_a_run_and_into_published_checkpoints(source, has_curves, trained, tmp_path):
    folder, _ = trained
    result = run("report", source, f"--output={tmp_path}", cwd=folder)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "report.html").read_text()
    assert "Attention, head by head" in page and (tmp_path / "report-attention.png").exists()
    assert (tmp_path / "report.png").exists() == ("Thin lines: training" in page) == has_curves


@pytest.mark.slow
@pytest.mark.parametrize("module", sorted({module for module, _ in COMMANDS.values()}))
def test_help_imports_no_more_than_it_needs(module, tmp_path):
    """So that it answers at once."""
    result = run(module, "--help", cwd=tmp_path, fresh=True, PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0 and f"python -m bertjax.{module}" in result.stdout
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert {"absl", "bertjax"} <= imported and not imported & {"jax", "flax", "optax", "orbax", "tensorflow", "scipy"}


BAD = {
    "no config": ([], "--config"),
    "no such config": (["--config=nowhere.py"], "error: --config=nowhere.py: no such file"),
    "no config but a text": (
        ["--config=one.txt"],
        "error: --config=one.txt: not Python: line 1: invalid syntax",
    ),
    "long text to fill": (
        base("--config.data.records=RECORDS", *TINY, "--config.eval.fill_masks=('the [MASK]" + " x" * 600 + "',)"),
        "tokens, more than the model's 512 positions",
    ),
    "no such size": ([f"--config={ROOT}/experiments/small.py:huge"], "unknown model size 'huge'"),
    "no records": (base("--config.data.records=nowhere"), "config.data.records: no folder 'nowhere'"),
    "misspelt flag": (base("--workdirr=x"), "workdirr"),
    "misspelt field": (base("--config.batchsize=3"), "did you mean batch_size?"),
    "wrong type": (base("--config.batch_size=many"), "error: --config.batch_size=many: not a whole number"),
    "argument": (base("train", "--config.data.corpus=x.txt"), "unexpected argument 'train'"),
    "no corpus": (base(), "config.data.corpus = None: say where the text is"),
    "missing corpus": (base("--config.data.corpus=nowhere.txt"), "data.corpus: no file or folder 'nowhere.txt'"),
    "empty corpus": (base("--config.data.corpus=empty.txt"), "data.corpus: 'empty.txt' contains no text"),
    "heads": (
        base("--config.model.hidden_size=100", "--config.data.corpus=x"),
        "multiple of model.num_attention_heads",
    ),
    "empty vocabulary": (
        base("--config.data.corpus=one.txt", "--config.tokenizer.path=empty.txt"),
        "the vocabulary empty.txt is empty",
    ),
    "vocabulary too large": (
        base("--config.data.corpus=one.txt"),
        "config.model.vocab_size = 30522: this corpus gives",
    ),
    "mesh": (base("--config.mesh.data=7", "--config.data.corpus=x"), "does not multiply to the 1 devices"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_mistakes_get_one_clear_line(name, trained, tmp_path):
    arguments, message = BAD[name]
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("One document of one line.\n")
    records = str(trained[0] / "run/records")
    result = run("main", *(argument.replace("RECORDS", records) for argument in arguments), cwd=tmp_path)
    assert result.returncode != 0
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.count("error:") <= 1


def test_a_workdir_of_another_model_is_refused(trained):
    folder, _ = trained
    arguments = base("--config.data.corpus=text.txt", "--workdir=run", *TINY, "--config.model.num_hidden_layers=3")
    result = run("main", *arguments, cwd=folder)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert "error: config.model.num_hidden_layers = 3: run holds a run with 2" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--checkpoint=nowhere", "a [MASK]"], "no checkpoint in 'nowhere'"),
        (["--checkpoint=run"], "no text: give one"),
        (["--checkpoint=run", "a [MASK]", "no mask here"], "no [MASK] in 'no mask here'"),
        (["--checkpoint=run", "--input=nowhere.txt"], "--input: no file 'nowhere.txt'"),
        (["a [MASK]"], "--checkpoint"),
        (["--checkpoint=run", "--top_p=0.5", "a [MASK]"], "--top_p=0.5: give --generate=N as well"),
        (["--checkpoint=run", "--generate=5", "a"], "only a left-to-right model (model.causal) continues a text"),
    ],
)
def test_predict_refuses_what_it_cannot_do(trained, arguments, message):
    folder, _ = trained
    result = run("predict", *arguments, cwd=folder)
    assert result.returncode != 0 and message in result.stderr and "Traceback" not in result.stderr
    assert not result.stdout  # nothing is half done
