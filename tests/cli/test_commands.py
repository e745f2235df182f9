"""The commands as a new user runs them: from text to filled masks, and error messages for mistakes."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from bertjax.cli.commands import COMMANDS
from bertjax.cli.next_commands import uses_of
from bertjax.cli.overrides import from_arguments
from bertjax.common.errors import UserError
from bertjax.distributed.topology import has_accelerator
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from tests.checkpoints import on_one_device  # noqa: F401  a fixture
from tests.conftest import make_corpus
from tests.interop.test_golden import GOLDEN
from tests.processes import QUICK, ROOT, environment_with, run, start

SETTINGS = """
    data.heldout_fraction=0.15 data.dupe_factor=2 model.vocab_size=150 model.hidden_size=16 model.num_attention_heads=2
    model.num_hidden_layers=1 model.intermediate_size=32 batch_size=16 mesh.data=1 unroll=no stages.short.steps=6
    stages.short.length=32 stages.long.steps=4 stages.long.length=64 stages.long.max_predictions_per_seq=10
    log_every_steps=2 eval.max_sequences=32
"""
TINY = [f"--config.{setting}" for setting in SETTINGS.split()]  # train in seconds


def base(*arguments):
    return [f"--config={ROOT / 'experiments' / 'base.py'}", *arguments]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder in which `main` trained a run from text to the end."""
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "text.txt").write_text(make_corpus(80))
    result = run("main", *base("--config.data.corpus=text.txt", "--workdir=run", *TINY), cwd=folder, fresh=True)
    assert result.returncode == 0, result.stderr
    return folder, result


def test_main_trains_from_text_to_filled_masks(trained):
    folder, result = trained
    assert "held-out masked words: loss" in result.stdout and "unigram baseline" in result.stdout
    assert "the man went to the [MASK] to buy a [MASK] of milk" in result.stdout
    assert "step 10/10 loss" in result.stdout
    assert "config.optimizer.warmup_steps = 10000: the run has 10 steps and ends during the warm-up" in result.stdout
    assert re.search(r"^converting the text to sequences of 32 and 64 tokens$.*^step 1/10$", result.stdout, re.S | re.M)
    assert result.stdout.endswith("the run is in run; see run/report.html and run/checkpoints/10\n")
    predict, convert, _ = proposals(result)
    assert predict == [
        "bertjax",
        "predict",
        "run",
        "the man went to the [MASK] to buy a [MASK] of milk .",
    ]
    assert convert == ["bertjax", "convert", "run", "run-huggingface", "--format=huggingface"]
    names = {path.name for path in (folder / "run").iterdir()}
    assert names >= {"config.json", "vocab.txt", "records", "checkpoints", "metrics.jsonl", "tensorboard", "report.txt"}
    assert names >= {"report.html", "report.png"}
    assert not list((folder / "run").rglob("*.partial"))


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(trained):
    """A changed setting is named in the output."""
    folder, result = trained
    arguments = base("--config.data.corpus=text.txt", "--workdir=run", *TINY)
    again = run("main", *arguments, cwd=folder)
    assert again.returncode == 0 and again.stdout.startswith("already finished: 10 steps")
    first_lines = [line for line in result.stdout.split("\n") if not line.startswith("drawing ")]
    lines = again.stdout.split("\n")[1:]
    assert lines == first_lines[-len(lines) :]
    other = run("main", *arguments, "--config.seed=5", cwd=folder)
    assert "this run was trained with other settings: seed = 5 (was 0)" in other.stdout
    refused = run("main", *arguments, "--config.model.num_hidden_layers=3", cwd=folder)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: config.model.num_hidden_layers = 3: run holds a run with 1")


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
    lines = [
        {"good": f"the ship saw the {word} .", "bad": f"ship the saw {word} the .", "paradigm": f"x{i % 2}"}
        for i, word in enumerate("ab cd")
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = "--checkpoint=run", "--pairs=pairs.jsonl"
    plain = run("evaluate", *arguments, cwd=folder)
    assert plain.returncode == 0 and "% of 3" in plain.stdout and "in 5 pairs" not in plain.stdout, plain.stderr
    assert "of 5 pairs (chance: 50 %)" in plain.stdout
    scores = json.loads(run("evaluate", *arguments, "--most=1", "--json", cwd=folder).stdout)
    assert scores["pairs"] == 2 and scores["paradigms"].keys() == {"x0", "x1"}
    assert scores["share"] == sum(scores["paradigms"].values()) / 2
    missing = run("evaluate", "--checkpoint=run", "--pairs=none.jsonl", cwd=folder)
    assert missing.returncode == 1 and missing.stderr == "error: --pairs=none.jsonl: no such file; correct the path\n"


@pytest.mark.slow
@pytest.mark.skipif(has_accelerator(), reason="JAX initializes the accelerator of this machine")
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="pip install -e '.[aot]'")
def test_a_machine_without_a_tpu_does_not_initialize_one(trained):
    """libtpu does not print errors before the output of the command."""
    folder, _ = trained
    environment = {name: value for name, value in environment_with().items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "bertjax.predict", "--checkpoint=run", "the [MASK] stayed ."]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and result.stdout.startswith("the [MASK] stayed .")
    assert result.stderr == ""


def test_main_trains_on_records_of_prepare_and_vocabulary(trained, tmp_path):
    folder, _ = trained
    corpus = f"--config.data.corpus={folder}/text.txt"
    learnt = run("vocabulary", *base(corpus, "--output=words", *TINY), cwd=tmp_path)
    assert learnt.returncode == 0 and "learned 150 tokens, written to words/vocab.txt" in learnt.stdout, learnt.stderr
    assert (tmp_path / "words" / "vocab.txt").read_text() == (folder / "run" / "vocab.txt").read_text()
    words = "--config.tokenizer.path=words/vocab.txt"
    arguments = base(corpus, words, "--output=out", "--workers=1", *TINY)
    prepared = run("prepare", *arguments, cwd=tmp_path, fresh=True)
    assert prepared.returncode == 0 and prepared.stdout.endswith("written to out\n"), prepared.stderr
    output, run_records = tmp_path / "out", folder / "run" / "records"
    files = [path.relative_to(run_records) for path in run_records.rglob("*.tfrecord")]
    assert files and all((output / f).read_bytes() == (run_records / f).read_bytes() for f in files)

    # The commands that are proposed are the next commands of a user.
    kept = base(corpus, *TINY)
    proposed = [[*kept, words, "--output=words/records"], [*kept, words, "--workdir=runs/base"]]
    assert [command[2:] for command in proposals(learnt)] == proposed
    (training,) = proposals(prepared)
    assert training[:2] == ["bertjax", "train"] and training[-2:] == [
        "--config.data.records=out",
        "--workdir=runs/base",
    ]
    tried = run("main", *training[2:], cwd=tmp_path, **{QUICK: "untrained"})
    assert tried.returncode == 0, tried.stderr


def proposals(result):
    """Returns the words of the commands that a command proposes at the end of its output."""
    _, _, lines = result.stderr.rpartition("next:\n")
    return [shlex.split(line) for line in lines.splitlines()]


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_resumes(trained, tmp_path):
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
    printed = re.fullmatch(
        r"stopping: saving step (\d+) first\nstopped at step (\d+); the same .*\n", errors
    )  # no TensorFlow messages
    assert printed and int(printed[2]) - int(printed[1]) in (0, 1), errors
    steps = sorted(int(path.name) for path in (tmp_path / "stopped" / "checkpoints").iterdir())
    assert steps and 3 <= steps[-1] < 1000


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_prepare_stops_at_once_and_keeps_finished_parts(number, tmp_path):
    (tmp_path / "text.txt").write_text(20 * make_corpus(2_000))
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the"]))
    arguments = base("--config.data.corpus=text.txt", "--output=out", "--workers=2", *TINY)
    arguments += ["--config.model.vocab_size=6", "--config.tokenizer.path=vocab.txt", "--config.data.dupe_factor=1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "bertjax.prepare", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=tmp_path, env=environment_with(), start_new_session=True,
    )  # fmt: skip
    while not list((tmp_path / "out").glob("unfinished/*/[!c]*")):  # corpus-... means that the workers are running
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, errors = process.communicate(timeout=300)  # the pipe is closed by all processes: no worker is left
    assert process.returncode == 130 and errors in ("interrupted\n", "terminated\n")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"vocab.txt", "unfinished"}


def test_convert_round_trip_and_predict(trained, tmp_path):
    folder, _ = trained
    run_folder = folder / "run"
    ways = (run_folder, "hf", "huggingface"), ("hf", "google", "tf1"), ("google", "b", "bertjax")
    for source, output, form in ways:
        result = run("convert", f"--source={source}", f"--output={output}", f"--format={form}", cwd=tmp_path)
        assert result.returncode == 0 and f"-> {form}: " in result.stdout, result.stderr
        assert proposals(result)[0] == ["bertjax", "predict", output, "the [MASK]"]
    text = "the [MASK] saw the ship ."
    before, after = (run("predict", f"--checkpoint={path}", text, cwd=tmp_path) for path in (run_folder, "b"))
    assert before.stdout == after.stdout and "[MASK] 1: " in after.stdout, after.stderr
    again = run("convert", "--source=hf", "--output=hf", "--format=tf1", cwd=tmp_path)
    assert again.returncode != 0 and "error: --output=hf: exists and is not empty" in again.stderr


@pytest.mark.slow
def test_a_run_resumes_after_its_init_checkpoint_is_deleted(trained, tmp_path):
    folder, _ = trained
    assert run("convert", f"--source={folder}/run", "--output=hf", "--format=huggingface", cwd=tmp_path).returncode == 0
    arguments = base(f"--config.data.records={folder}/run/records", "--config.init_checkpoint=hf", "--workdir=w", *TINY)
    first = run("main", *arguments, cwd=tmp_path, **{QUICK: "yes"})
    assert "started from hf (huggingface): 26 of 26 arrays loaded" in first.stdout, first.stderr
    shutil.rmtree(tmp_path / "hf")
    longer = run("main", *arguments, "--config.stages.long.steps=5", cwd=tmp_path, **{QUICK: "yes"})
    assert longer.returncode == 0 and "step 11/11" in longer.stdout, longer.stderr


def test_report_describes_a_run(trained, tmp_path):
    folder, _ = trained
    result = run("report", "run@10", f"--output={tmp_path}", "--text=the ship saw the oven .", cwd=folder)
    assert result.returncode == 0 and result.stdout == f"{tmp_path}/report.html\n", result.stderr
    page = (tmp_path / "report.html").read_text()
    assert "Attention, head by head" in page and "Nearest word embeddings" in page and page.count("<img") == 2
    assert "Thin lines: training" in page
    run_report = (folder / "run/report.html").read_text()
    assert "Attention, head by head" not in run_report and '<a href="checkpoints/10">run@10</a>' in run_report


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "WORKDIR: is missing; name the workdirs of one or more runs, as in bertjax report runs/mine"),
        (["run", "run"], "--output: is missing; name a folder for the page about several runs, such as --output=runs"),
        (["run", "run", "--output=x", "--text=a"], "--text: is for a single run; the page of 2 runs has curves only"),
        (["nowhere"], "no checkpoint in 'nowhere': give the workdir of a run, a Hugging Face folder (config.json and "
         "model.safetensors), an adapter of PEFT, hub:NAME for a model of the hub, or Google's bert_model.ckpt"),
        (["run", "nowhere", "--output=x"], "no nowhere/config.json: 'nowhere' is not the workdir of a run"),
        (["run@7"], "run@7: the run has no checkpoint of this step; choose one of the steps 10"),
        ([str(GOLDEN)], f"--output: is missing; name the folder for the page about {GOLDEN}"),
        (["."], ".: neither a run nor a sweep with finished trials; name the workdir of a run"),
        ([".", "--words=a"], "--words: . has no checkpoint; name a trial of the sweep, such as runs/x/runs/y"),
    ],
)  # fmt: skip
def test_report_refuses_invalid_runs(trained, arguments, message):
    folder, _ = trained
    (folder / "runs").mkdir(exist_ok=True)
    result = run("report", *arguments, cwd=folder)
    assert result.returncode == 1 and result.stderr == f"error: {message}\n"


# Forks for each module, so that Python starts once; each fork prints the packages that the help of a command imports.
HELPS = """
import os, runpy, sys
for module in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        sys.argv = [module, "--help"]
        try:
            runpy.run_module(f"bertjax.{module}", run_name="__main__", alter_sys=True)
        finally:
            print("IMPORTED", module, *{name.partition(".")[0] for name in sys.modules}, flush=True)
            os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.slow
def test_help_imports_few_packages(tmp_path):
    """Few imports make the help fast."""
    modules = sorted({module for module, _ in COMMANDS.values()})
    command = [sys.executable, "-c", HELPS, *modules]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment_with())
    assert all(f"example: bertjax {name}" in result.stdout for name in COMMANDS)
    lines = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("IMPORTED")]
    assert [module for module, *_ in lines] == modules
    for module, *imported in lines:
        assert not {"jax", "flax", "optax", "orbax", "tensorflow", "scipy"} & {*imported} and "absl" in imported, module


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--config"),
        (["--config=one.txt"], "error: --config=one.txt: not Python: line 1: invalid syntax"),
        (base("--workdirr=x"), "workdirr"),
        (base("train", "--config.data.corpus=x.txt"), "error: unexpected argument 'train'"),
        (base("--config.mesh.data=7", "--config.data.corpus=x"), "the product must be 1, the number of devices"),
    ],
)
def test_mistakes_print_one_clear_line(arguments, message, tmp_path):
    (tmp_path / "one.txt").write_text("One document of one line.\n")
    result = run("main", *arguments, cwd=tmp_path)
    assert result.returncode != 0 and message in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("error:") <= 1


@pytest.mark.parametrize("arguments, message", [
    (["main", "--config=quickstart", "--wrokdir=x"], "--wrokdir: the command has no flag of this name; did you mean"),
    (["main", "quickstart"], "quickstart: --config names an experiment; write --config=quickstart"),
    (["main", "run"], "run: a run resumes with its first command, see run/commands.txt"),
    (["predict", "run", "--input=empty.txt"], "--input=empty.txt: contains no text; write one text per line"),
    (["extract", "run", "--input=empty.txt", "--output=v.npy"], "--input=empty.txt: contains no text; write one text"),
    (["extract", "run", "--output=v.txt", "a"], "--output=v.txt: must end in one of .npz, .npy, .parquet"),
])  # fmt: skip
def test_a_beginners_mistake_names_the_fix(arguments, message, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    (tmp_path / "empty.txt").write_text("")
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 1 and result.stderr.startswith(f"error: {message}"), result.stderr
    assert result.stderr.count("\n") == 1


def test_the_proposed_fine_tuning_has_the_sequence_length_of_the_model(trained):
    folder, _ = trained
    proposed = uses_of(str(folder / "run"))[-1]
    positions = json.loads((folder / "run/config.json").read_text())["model"]["max_position_embeddings"]
    assert proposed[1] == "train" and (f"--config.max_seq_length={positions}" in proposed) == (positions < 128)


def test_missing_flags_are_named_with_an_example_of_the_command(tmp_path):
    missing, no_experiment = run("submit", "--input=x", cwd=tmp_path), run("main", cwd=tmp_path)
    assert missing.returncode == no_experiment.returncode == 1
    assert missing.stderr == (
        "error: --checkpoint, --output: are missing; an example of the command: bertjax submit "
        "runs/mrpc --input=test.tsv --output=MRPC.tsv\n"
    )
    assert no_experiment.stderr.endswith("; an example of the command: bertjax train --config=quickstart\n")


@pytest.mark.parametrize(
    "settings, message",
    [
        (["data.records=RECORDS", f"eval.fill_masks=('the [MASK]{' x' * 600}',)"],
         "tokens, more than the model's 512 positions"),
        (["data.records=nowhere"], "config.data.records = 'nowhere': the folder does not exist"),
        (["data.corpus=nowhere.txt"], "config.data.corpus = 'nowhere.txt': no such file or folder"),
        (["data.corpus=empty.txt"], "data.corpus: 'empty.txt' contains no text"),
        (["data.corpus=one.txt", "tokenizer.path=empty.txt"], "the vocabulary empty.txt is empty"),
        (["data.corpus=one.txt", "model.vocab_size=30522"], "config.model.vocab_size = 30522: this corpus gives"),
    ],
)  # fmt: skip
def test_wrong_data_print_one_clear_line(settings, message, trained, tmp_path, monkeypatch, in_process, on_one_device):  # noqa: F811
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("One document of one line.\n")
    monkeypatch.chdir(tmp_path)
    records = str(trained[0] / "run/records")
    arguments = [f"--config.{setting.replace('RECORDS', records)}" for setting in settings]
    config, _ = from_arguments(["bertjax", *base(*TINY, *arguments)])
    with pytest.raises(UserError) as error:
        validate(config)
        launch(config, tmp_path / "run")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--checkpoint=nowhere", "a [MASK]"], "no checkpoint in 'nowhere'"),
        (["run"], "no text for the checkpoint 'run': add a text"),
        (["--checkpoint=run", "a [MASK]", "no mask here"], "no [MASK] in 'no mask here'"),
        (["--checkpoint=run", "--input=nowhere.txt"], "--input=nowhere.txt: no such file"),
        (["a [MASK]"], "no text for the checkpoint 'a [MASK]'"),
        ([], "--checkpoint: is missing"),
        (
            ["--checkpoint=run", "--top_p=0.5", "a [MASK]"],
            "--top_p=0.5: is for --generate=N; add --generate, or leave the flag out",
        ),
        (["--checkpoint=run", "--generate=5", "a"], "only a left-to-right model (model.causal) continues a text"),
    ],
)
def test_predict_refuses_invalid_inputs(trained, arguments, message):
    folder, _ = trained
    result = run("predict", *arguments, cwd=folder)
    assert result.returncode != 0 and message in result.stderr and "Traceback" not in result.stderr
    assert not result.stdout  # no partial output
