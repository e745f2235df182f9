"""A task that is defined outside of the package is trained, resumed, searched, predicted with and converted."""

import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import signal

import pytest

from bertjax import tasks
from bertjax.config import UserError, fine_tuning_config
from bertjax.data.batches.examples import Examples
from bertjax.interop import conversion, pretrained
from bertjax.tasks import sweep
from bertjax.tasks.finetuning import FineTuning
from bertjax.tasks.launch import launch
from bertjax.training import checkpoint as checkpoints
from bertjax.training import workdir
from bertjax.training.sinks.jsonl import read_metrics
from tests.conftest import launch_and_stop
from tests.processes import ROOT
from tests.processes import run as command
from tests.tasks import own_task
from tests.tasks.test_finetuning import quick

pytestmark = pytest.mark.usefixtures("on_one_device")

SEA = "ship sail harbour"  # two words with an s


@pytest.fixture(scope="module", autouse=True)
def registered():
    tasks.register("letter", own_task.TASK)
    yield
    del tasks.TASKS.registered["letter"]


def config_for(checkpoint, **fields):
    fields = dict(batch_size=32, epochs=6.0, max_seq_length=16, log_every_steps=4) | fields
    config = quick(fine_tuning_config("letter", letter="s"), "made up", checkpoint, **fields)
    config.checkpoint.keep = 3
    tasks.validate(config)
    return config


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    """The workdir of a run that was stopped in its third epoch, and resumed."""
    folder = tmp_path_factory.mktemp("own") / "run"
    config = config_for(checkpoint)
    config.checkpoint.every_steps = 6
    launch_and_stop(FineTuning, config, folder, step=20)
    assert checkpoints.steps(folder)[-1] == 18
    launch(config_for(checkpoint), folder)
    return folder


@pytest.mark.slow
def test_it_is_trained_and_resumed(trained):
    assert max(line.get("eval/accuracy", 0) for line in read_metrics(trained)) > 0.9
    assert "accuracy" in (trained / "report.txt").read_text() and "margin 0.25" in (trained / "report.txt").read_text()


@pytest.mark.slow
def test_a_workdir_stands_for_its_best_checkpoint_unless_another_is_chosen(trained, tmp_path):
    """Fine-tuning's; the latest of pre-training, whose scores at different lengths say nothing."""
    steps, best = checkpoints.steps(trained), checkpoints.best_step(trained)
    shutil.copytree(trained, tmp_path / "run")
    first = steps[0]
    for step in (first, steps[-1]):
        score = 2.0 if step == first else 0.0
        checkpoints.write_scores(tmp_path / "run", step, checkpoints.Scores({"accuracy": score}, score, decided={}))
    assert len(steps) > 1 and pretrained.read(trained).path == f"{trained}@{best}"
    for path, step in (("run", first), ("run@best", first), ("run@latest", steps[-1]), (f"run@{steps[-1]}", steps[-1])):
        assert pretrained.find(tmp_path / path).step == step
    chosen, other = (pretrained.read(tmp_path / path).params["bert"]["pooler"] for path in ("run", "run@latest"))
    assert (chosen["dense"]["kernel"] != other["dense"]["kernel"]).any()
    info = workdir.require_info(tmp_path / "run")
    workdir.write_info(tmp_path / "run", dataclasses.replace(info, architecture=""), None)  # as of pre-training
    assert pretrained.find(tmp_path / "run").step == steps[-1]
    with pytest.raises(UserError, match=rf"run@9: no such checkpoint; there are {first}, "):
        pretrained.read(tmp_path / "run@9")
    for step in steps:
        (tmp_path / f"run/checkpoints/{step}/scores.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"run@best: none of its checkpoints has a score; use @latest"):
        pretrained.read(tmp_path / "run@best")
    with pytest.raises(UserError, match=r"@best needs the workdir of a run, but '.*nowhere' is not one"):
        pretrained.read(tmp_path / "nowhere@best")


@pytest.mark.slow
def test_its_own_fields_are_checked(trained, checkpoint):
    config = config_for(checkpoint)
    config.data.letter = "st"
    with pytest.raises(UserError, match=r"config.data.letter = 'st': one letter"):
        tasks.validate(config)
    config.data.letter = "w"
    with pytest.raises(UserError, match=r"config.data.letter = 'w': .* holds a run with 's'; choose another --workdir"):
        launch(config, trained)
    config.task = "lettre"
    with pytest.raises(UserError, match=r"config.task = 'lettre': choose one of pretraining, glue, .*, letter"):
        tasks.validate(config)


@pytest.mark.slow
def test_more_epochs_extend_a_finished_run(trained, checkpoint, tmp_path, capsys, monkeypatch):
    """Even if it is stopped in its last evaluation, when the report of the shorter run is still there."""
    shutil.copytree(trained, tmp_path / "run")

    def extend() -> str:
        launch(config_for(checkpoint, epochs=7.0), tmp_path / "run")
        return capsys.readouterr().out

    launch(config_for(checkpoint), tmp_path / "run")
    assert capsys.readouterr().out.startswith("already finished: 48 steps")
    with monkeypatch.context() as patch:
        patch.setattr(FineTuning, "evaluate", lambda *_: os.kill(os.getpid(), signal.SIGINT) or stop())
        with pytest.raises(KeyboardInterrupt):
            extend()
    said = capsys.readouterr().out
    assert "resuming with changed settings: epochs = 7.0 (was 6.0)" in said and "from step 48" in said
    assert checkpoints.steps(tmp_path / "run")[-1] == 56
    assert "already finished" not in extend()
    assert checkpoints.read_scores(tmp_path / "run", 56) is not None
    assert read_metrics(tmp_path / "run")[-1]["step"] == 56
    assert extend().startswith("already finished: 56 steps")


def stop():
    raise KeyboardInterrupt


@pytest.mark.slow
def test_other_numbers_of_examples_are_noticed(trained, checkpoint, tmp_path, capsys, monkeypatch):
    shutil.copytree(trained, tmp_path / "run")

    def load(config, tokenizer):
        dataset = own_task.load(config, tokenizer)
        whole = (dataset.train.input_ids, dataset.train.token_types, dataset.train.labels)
        return dataclasses.replace(dataset, train=Examples(*(part[:208] for part in whole)))

    monkeypatch.setitem(tasks.TASKS.registered, "letter", dataclasses.replace(own_task.TASK, load=load))
    launch_and_stop(FineTuning, config_for(checkpoint, epochs=9.0), tmp_path / "run", step=48)
    assert "train_examples = 208 (was 240)" in capsys.readouterr().out


def test_a_broken_entry_point_is_named_and_hurts_nobody_else(monkeypatch):
    point = importlib.metadata.EntryPoint("theirs", "no.such.module:TASK", tasks.TASKS.group)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [point])
    with pytest.raises(UserError, match=r"task 'theirs': cannot load no.such.module:TASK, .*ModuleNotFoundError"):
        tasks.get("theirs")
    assert tasks.of_checkpoint("", "BertModel") is None
    with pytest.raises(UserError, match=r"task 'glue' is one of bertjax's own"):
        tasks.register("glue", own_task.TASK)


@pytest.mark.slow
def test_the_commands_find_it_by_its_entry_point(trained, tmp_path):
    """As an installed package would bring it: predict runs in a process of its own, where nobody registers anything."""
    package = tmp_path / "site/own-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[bertjax.tasks]\nletter = tests.tasks.own_task:TASK\n")
    path = os.pathsep.join([str(ROOT), str(tmp_path / "site")])
    result = command("predict", f"--checkpoint={trained}", SEA, "wave net oven", cwd=tmp_path, PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"text": SEA, "label": "with", "letter": "s", "margin": 0.25},
        {"text": "wave net oven", "label": "without", "letter": "s", "margin": 0.25},
    ]
    result = command("predict", f"--checkpoint={trained}", SEA, cwd=tmp_path)  # without the package
    assert result.returncode == 1 and "error: config.task = 'letter': choose one of" in result.stderr


@pytest.mark.slow
def test_it_is_converted_there_and_back(trained, checkpoint, tmp_path):
    conversion.convert(trained, tmp_path / "ours", "bertjax")
    before, after = ([*own_task.predict(pretrained.read(path), [(SEA,)])] for path in (trained, tmp_path / "ours"))
    assert before == after
    line = conversion.convert(trained, tmp_path / "hf", "huggingface")
    assert "left out, for which BertForSequenceClassification has no place: margin = 0.25" in line
    assert pretrained.read(tmp_path / "hf").labels == ("without", "with")
    with pytest.raises(UserError, match=r"holds params without the optimizer's state, .*--config.init_checkpoint="):
        launch(config_for(checkpoint), tmp_path / "ours")


@pytest.mark.slow
def test_nothing_is_overwritten_before_the_run_is_restored(trained, checkpoint, monkeypatch):
    def fails(*_):
        raise UserError("torn")

    before = (trained / "config.json").read_text()
    config = config_for(checkpoint, epochs=9.0)
    monkeypatch.setattr(checkpoints.Checkpoints, "restore", fails)
    for optimizer, message in (
        ("lamb", r"config.optimizer.name = 'lamb': .* holds a run with 'adam'; choose another"),
        ("adam", "torn"),
    ):
        config.optimizer.name = optimizer
        with pytest.raises(UserError, match=message):
            launch(config, trained)
        assert (trained / "config.json").read_text() == before


def test_its_search_is_that_of_its_paper(checkpoint):
    config = config_for(checkpoint, sweep="paper")
    assert sweep.parse(config) == [{"learning_rate": 1e-8}, {"learning_rate": 3e-3}]


def test_other_rooms_know_no_task_by_name():
    """Names of TF1's variables are Google's; a record's "features" are TensorFlow's; an axis of params is "embed"; the
    library has methods that are verbs."""
    words = "|".join(name for name in tasks.FINE_TUNING if name != "features")
    named = re.compile(rf"(?<!cls/)\b({words})\b|[\"']features[\"']", re.IGNORECASE)
    kept = {"library.py": r"\b(classify|tag|embed)\b", "model": r"\bembed\b", "sharding": r"\bembed\b"}
    rooms = (".", "training", "data", "interop", "model", "planner", "sharding", "text")
    files = [path for room in rooms for path in (ROOT / "bertjax" / room).glob("*.py")]
    lines = [(path, line) for path in files for line in path.read_text().splitlines() if "Value(tag=" not in line]
    verbs = [kept.get(path.name, kept.get(path.parent.name, "$^")) for path, _ in lines]
    hits = [(path, line) for (path, line), verb in zip(lines, verbs) if named.search(re.sub(verb, "", line))]
    assert len(files) > 40 and not hits
