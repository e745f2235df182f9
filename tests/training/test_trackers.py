"""Sinks that continue one run of a tracker: MLflow with local files, W&B offline, and a tracker with failures."""

import importlib.util
import json
import math

import pytest
from etils import epath

from bertjax.cli.overrides import from_arguments
from bertjax.common.errors import UserError
from bertjax.launch.validate import validate
from bertjax.training.loop import train_task
from bertjax.training.trackers import trackers
from bertjax.training.trackers.jsonl import JsonLines, read_metrics
from bertjax.training.trackers.remote import RemoteTracker
from tests.conftest import tiny_config
from tests.training.test_loop import stopped_run
from tests.training.toy import Toy, toy_config


class Kept(RemoteTracker):
    """A tracker that stores its metrics in this process; `down`: it is unreachable."""

    name = package = "kept"
    down = False

    def open(self, run, workdir, config):
        self._check()
        Kept.runs = getattr(Kept, "runs", {})
        return run or f"run{len(Kept.runs)}"

    def send(self, run, numbers):
        self._check()
        Kept.runs.setdefault(run, []).extend((numbers.step, *item) for item in numbers.metrics.items())

    def end(self, run, error):
        Kept.runs[run].append(error)

    def _check(self):
        if Kept.down:
            raise ConnectionError("no\nroute")


@pytest.fixture
def kept(monkeypatch):
    """Registers the tracker; returns its metrics by run."""
    monkeypatch.setitem(trackers.TRACKERS.registered, "kept", Kept)
    monkeypatch.setattr(Kept, "runs", {}, raising=False)
    monkeypatch.setattr(Kept, "down", False)
    return Kept.runs


def written(folder, start: int, *numbers: tuple[int, dict], end=True, factory=Kept) -> RemoteTracker:
    """Writes the metrics of a process that starts after step `start`, to the tracker and to metrics.jsonl; returns the
    tracker.
    """
    folder = epath.Path(folder)
    both = [JsonLines(folder, start, None), factory(folder, start, toy_config())]
    for step, metrics in numbers:
        for sink in both:
            sink.write(step, metrics)
    if end:
        both[1].close()
    return both[1]


def test_a_tracker_gets_all_metrics_and_a_resumed_run_continues(kept, tmp_path):
    config = toy_config(sinks=("jsonl,kept",))
    stopped_run(lambda task: train_task(task, config, tmp_path, task.mesh), Toy(config), 7)
    train_task(task := Toy(config), config, tmp_path, task.mesh)
    lines = [(line["step"], name, x) for line in read_metrics(tmp_path) for name, x in line.items() if name != "step"]
    received = kept["run0"]
    assert len(kept) == 1 and [item for item in received if isinstance(item, tuple)] == lines
    assert [item for item in received if not isinstance(item, tuple)] == [KeyboardInterrupt, None]


def test_discarded_steps_are_not_sent_twice(kept, tmp_path):
    written(tmp_path, 0, (2, {"a": 1.0}), (4, {"a": 2.0}), (6, {"a": 3.0}), end=False)  # killed
    written(tmp_path, 4, (6, {"a": 3.0}), (6, {"b": 0.5}), (8, {"a": 4.0}))
    assert kept == {"run0": [(2, "a", 1.0), (4, "a", 2.0), (6, "a", 3.0), (6, "b", 0.5), (8, "a", 4.0), None]}
    written(tmp_path, 0, (2, {"a": 9.0}))  # without a checkpoint, it is another run
    assert kept["run1"] == [(2, "a", 9.0), None]


def test_a_tracker_added_later_gets_earlier_metrics(kept, tmp_path):
    lines = JsonLines(epath.Path(tmp_path), 0, None)
    for step, value in ((2, 1.0), (4, math.nan), (6, 3.0)):
        lines.write(step, {"a": value})
    written(tmp_path, 4, (6, {"a": 3.5}))
    (first, second, third, end) = kept["run0"]
    assert (first, second[:2], third, end) == ((2, "a", 1.0), (4, "a"), (6, "a", 3.5), None) and math.isnan(second[2])


def test_a_failing_tracker_does_not_stop_the_run_and_gets_all_metrics_later(kept, tmp_path, capsys):
    sink = written(tmp_path, 0, (2, {"a": 1.0}), end=False)
    Kept.down = True
    sink.write(4, {"a": 2.0})
    sink.write(4, {"b": 2.5})
    sink.flush()
    message = "kept: ConnectionError: no route; training continues; metrics are sent again at each checkpoint\n"
    assert capsys.readouterr().out == message and kept == {"run0": [(2, "a", 1.0)]}
    assert json.loads((tmp_path / "kept.json").read_text()) == {"run": "run0", "step": 2, "names": ["a"]}
    Kept.down = False
    sink.write(6, {"a": 3.0})
    sink.flush()
    assert kept["run0"][1:] == [(4, "a", 2.0), (4, "b", 2.5), (6, "a", 3.0)]

    Kept.down = True
    sink.write(8, {"a": 4.0})
    sink.close()
    later = (
        "kept: ConnectionError: no route; the missing metrics are in metrics.jsonl, and are sent when the run resumes\n"
    )
    assert capsys.readouterr().out == message + later
    remedy = f"; to start a new run instead of run0, delete {tmp_path}/kept.json"
    with pytest.raises(UserError) as error:
        written(tmp_path, 2)
    assert str(error.value) == f"config.sinks = 'kept': ConnectionError: no route{remedy}"


def test_names_of_sinks_are_validated(monkeypatch):
    config, _ = from_arguments(
        ["", "--config=quickstart", "--config.sinks=jsonl,tensorboard,mlflow", "--config.sinks=wandb"]
    )
    assert trackers.tracker_names(config) == ("tensorboard", "mlflow", "wandb")
    config = tiny_config("text.txt")
    config.sinks = ("jsonl, mlfow",)
    with pytest.raises(UserError, match=r"config.sinks = 'mlfow': choose one of jsonl, tensorboard, mlflow, wandb"):
        validate(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config.sinks = ("wandb",)
    with pytest.raises(
        UserError, match=r"config.sinks = 'wandb': needs the package wandb; run pip install 'bertjax\[wandb\]'"
    ):
        validate(config)


@pytest.mark.extra_packages
def test_mlflow_has_one_run_with_every_metric_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "toys")
    make, workdir = trackers.TRACKERS.get("mlflow"), tmp_path / "toy"
    written(workdir, 0, (2, {"train/loss": 3.0}), (4, {"train/loss": math.nan}), end=False, factory=make)
    written(workdir, 2, (4, {"train/loss": 2.0, "eval/ndcg@10": 0.5}), (6, {"train/loss": 1.0}), factory=make)

    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("toys").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == [2, 4, 6] and [history[0].value, history[2].value] == [3.0, 1.0]
    assert run.data.metrics["eval/ndcg_10"] == 0.5 and (run.info.run_name, run.info.status) == ("toy", "FINISHED")
    assert run.data.params["batch_size"] == "16" and run.data.params["model.hidden_act"] == "gelu_new"

    client.delete_run(run.info.run_id)
    with pytest.raises(UserError, match=rf"to start a new run instead of {run.info.run_id}, delete .*/toy/mlflow.json"):
        written(workdir, 6, factory=make)


@pytest.mark.extra_packages
def test_wandb_resumes_one_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    make, workdir = trackers.TRACKERS.get("wandb"), tmp_path / "toy"
    written(workdir, 0, (2, {"train/loss": 3.0}), (4, {"train/loss": 2.0}), factory=make)
    written(workdir, 2, (4, {"train/loss": 2.0}), (6, {"train/loss": 1.0}), factory=make)
    run = json.loads((workdir / "wandb.json").read_text())
    # Two folders have one run: the test reads their files, because folders of the same second have a number after the
    # run name.
    assert [path.stem for path in (workdir / "wandb").glob("offline-run-*/*.wandb")] == [f"run-{run['run']}"] * 2
    assert (run["step"], run["names"]) == (6, ["train/loss"])
