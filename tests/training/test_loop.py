"""The loop: resume, microbatches, meshes, optimization, NaN, and the written files."""

import functools
import gzip
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.distributed.mesh import make_mesh, put_batch
from bertjax.distributed.rules import RULES
from bertjax.training.checkpoints import checkpoint
from bertjax.training.loop import train_task
from bertjax.training.monitoring.clocks import PARTS
from bertjax.training.monitoring.logging import MetricsWriter
from bertjax.training.optim.schedules import make_schedule
from bertjax.training.step import Program, put_hyperparameters
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import one_device_mesh, pretraining_task, tiny_config
from tests.training.toy import Toy, toy_config


def config_for(records_folder):
    config = tiny_config(records=records_folder)
    config.model.update(hidden_size=16, intermediate_size=32)
    return config


def make_task(config, mesh=None):
    return pretraining_task(config, mesh or one_device_mesh(config), config.data.records)


def leaves(tree):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def program(records_folder):
    """The compiled functions for all tests without changes of the model and the loss."""
    task = make_task(config_for(records_folder))
    return Program(task, task.config, task.mesh)


@pytest.fixture(scope="module")
def straight_run(records_folder, program, tmp_path_factory):
    """All ten steps without interruption: workdir and final state."""
    workdir, config = tmp_path_factory.mktemp("straight"), config_for(records_folder)
    task = make_task(config)
    result = train_task(task, config, workdir, task.mesh, program=program)
    assert program.train_step._cache_size() == 2  # one program for each of the two lengths
    return workdir, leaves(result.state), result.scores


def test_resume_gives_identical_params(records_folder, program, straight_run, tmp_path):
    """A signal stops the run after step 5, in the first stage, and again after step 8, in the second."""
    config = config_for(records_folder)

    def run(task):
        return train_task(task, config, tmp_path, task.mesh, program=program)

    for stop_after in (5, 8):
        stopped_run(run, make_task(config), stop_after)
        assert checkpoint.steps(tmp_path)[-1] == stop_after
    result = run(make_task(config))
    _, expected, expected_scores = straight_run
    resumed = leaves(result.state)
    assert expected.keys() == resumed.keys()
    for name in expected:
        assert np.array_equal(expected[name], resumed[name]), name
    assert result.scores == expected_scores


def stop_when(task, step):
    """Sends a SIGTERM while the batch of `step` is prepared."""
    batches = task.batches

    def interrupted(start):
        for number, batch in enumerate(batches(start), start + 1):
            if number == step + 1:  # the loop fetches one batch ahead
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    task.batches = interrupted


def stopped_run(run, task, step):
    """Runs a task until a SIGTERM stops the run after a step."""
    stop_when(task, step)
    with pytest.raises(KeyboardInterrupt, match=f"stopped at step {step}"):
        run(task)
    return task


def test_metrics_are_written_once_for_every_step(straight_run):
    workdir, _, scores = straight_run
    lines = read_metrics(workdir)
    train_lines = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in train_lines] == [2, 4, 5, 6, 8, 10]
    assert {"train/mlm_accuracy", "train/nsp_accuracy", "train/learning_rate", "train/sequences_per_second",
            "train/tokens_per_second", "train/grad_norm"} <= train_lines[0].keys()  # fmt: skip
    (first, last) = [line for line in lines if "eval/mlm_loss" in line]
    assert (first["step"], last["step"]) == (5, 10)
    assert {f"eval/{name}" for name in scores.scores} | {"step"} == last.keys()
    assert {"eval/unigram_loss", "eval/mlm_accuracy", "eval/nsp_accuracy"} <= last.keys()


def two_steps(records_folder, mesh_sizes, microbatches, program=None):
    """Returns the params and metrics after two steps of the first stage on a mesh (data, fsdp, tensor)."""
    config = config_for(records_folder)
    config.mesh.update(dict(zip(("data", "fsdp", "tensor"), mesh_sizes)))
    config.microbatches = microbatches
    mesh = make_mesh(config, jax.devices()[: int(np.prod(mesh_sizes))])
    task = make_task(config, mesh)
    program = program or Program(task, config, mesh)
    hyperparameters = put_hyperparameters(0, make_schedule(config.optimizer, 10), mesh)
    state = program.init(jax.random.key(0))
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        for batch in itertools.islice(task.batches(0), 2):
            state, metrics = program.train_step(state, put_batch(batch, mesh), hyperparameters)
    return leaves(state.params), jax.device_get(metrics)


@pytest.fixture(scope="module")
def on_one_device(records_folder, program):
    return two_steps(records_folder, (1, 1, 1), 1, program)


def test_steps_are_equal_on_several_devices_and_with_microbatches(records_folder, on_one_device):
    """Dropout masks are equal, too."""
    assert_same_steps(two_steps(records_folder, (2, 2, 2), 2), on_one_device)


def assert_same_steps(actual, expected):
    """Compares two results of `two_steps`."""
    for values, expected_values, tolerance in zip(actual[::-1], expected[::-1], (dict(rtol=2e-5), dict(atol=3e-5))):
        for name in values:
            np.testing.assert_allclose(values[name], expected_values[name], err_msg=name, **tolerance)


@pytest.mark.slow
def test_training_runs_without_tensorflow(tmp_path):
    """The task, the loop, checkpoints and TensorBoard import neither TensorFlow nor PyArrow."""
    script = f"""
import pathlib, sys
from bertjax.training.loop import train_task
from tests.training.toy import Toy, toy_config

task = Toy(toy_config())
state, *_ = train_task(task, task.config, pathlib.Path({str(tmp_path)!r}), task.mesh)
assert int(state.step) == 10 and not {{"tensorflow", "pyarrow"}} & set(sys.modules)
print("trained")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip().endswith("trained"), result.stderr[-2000:]


# Properties of any task, tested with a task that compiles in a moment.


@pytest.fixture(scope="module")
def toy_program():
    task = Toy(toy_config())
    return Program(task, task.config, task.mesh)


@pytest.fixture
def train_toy(toy_program, tmp_path):
    """(task, **fields of the config) -> the result of `train`, in the folder of the test."""

    def run(task, workdir=tmp_path, **fields):
        return train_task(task, toy_config(**fields), workdir, task.mesh, program=toy_program)

    return run


def evaluated_steps(workdir):
    return [line["step"] for line in read_metrics(workdir) if "eval/score" in line]


def test_a_resumed_run_drops_lines_after_the_checkpoint(tmp_path):
    text = "".join(json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in (2, 4, 6))
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 7, "tra')
    writer = MetricsWriter(tmp_path, 4, toy_config())
    writer.write(6, {"train/loss": 2.0, "train/other": float("nan")})
    writer.flush()
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[-1]["train/loss"] == 2.0 and lines[-1]["train/other"] is None


def test_metrics_are_not_rewritten_without_dropped_lines(tmp_path):
    """A crash while the file is rewritten must not cost the lines of a million steps."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "train/loss": 1.0}\n')
    before = path.stat()
    MetricsWriter(tmp_path, 2, toy_config()).flush()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    MetricsWriter(tmp_path, 1, toy_config()).flush()  # drops a line: a new file replaces the old file
    assert path.stat().st_ino != before.st_ino and path.read_text() == ""


KEPT = dict(eval=dict(every_steps=2), checkpoint=dict(every_steps=1, keep=2))


@pytest.mark.slow
@pytest.mark.parametrize("scores, kept, steps", [
    ([1, 5, 4, 3, 2], dict(keep=2), [4, 9, 10]),  # the latest and the best
    ([1, 5, 4, 3, 2], dict(keep=1, keep_every=3), [3, 4, 6, 9, 10]),
    ([1, 5, 4, 3, 6], dict(keep=1), [10]),  # the last evaluation makes the earlier checkpoints obsolete
    ([1, 5, math.nan, 3, math.inf], dict(keep=2), [4, 9, 10]),  # not the best checkpoints
])  # fmt: skip
def test_latest_best_and_regular_checkpoints_are_kept(train_toy, tmp_path, scores, kept, steps):
    result = train_toy(Toy(toy_config(), scores=scores), eval=KEPT["eval"], checkpoint=dict(every_steps=1) | kept)
    best = 4 if 4 in steps else 10
    assert checkpoint.steps(tmp_path) == steps and checkpoint.best_step(tmp_path) == best
    assert (result.best_step, result.best_scores.score) == (best, scores[best // 2 - 1])
    last = scores[-1] if math.isfinite(scores[-1]) else None
    assert checkpoint.read_scores(tmp_path, 10).scores == {"score": last}


def test_the_best_checkpoint_survives_a_restart(train_toy, tmp_path):
    """Scores are read back, and the earlier best score is compared with later scores."""
    stopped_run(functools.partial(train_toy, **KEPT), Toy(toy_config(), scores=[1, 5]), 5)
    assert checkpoint.best_step(tmp_path) == 4
    train_toy(Toy(toy_config(), scores=[4, 3, 2]), **KEPT)
    assert checkpoint.steps(tmp_path) == [4, 9, 10] and checkpoint.best_step(tmp_path) == 4
    assert checkpoint.read_scores(tmp_path, 4).decided == {"threshold": pytest.approx(3.14159, abs=1e-4)}
    assert (tmp_path / "predictions.json").read_text() == "4\n"  # the scores of the best checkpoint


def test_scores_on_different_data_are_not_compared(train_toy, tmp_path):
    """A loss at length 512 is lower than a loss at length 128, but not better."""
    task = Toy(toy_config(), scores=[9, 8, 1, 2, 1], measured_on="length 32")
    evaluate = task.run

    def two_lengths(params, step, after_batch):
        task.measured_on = "length 32" if step < 6 else "length 64"
        return evaluate(params, step, after_batch)

    task.run = two_lengths
    train_toy(task, **KEPT)
    assert checkpoint.best_step(tmp_path) == 8 and checkpoint.steps(tmp_path) == [8, 9, 10]


PATIENT = dict(eval=dict(every_steps=2, patience=2), checkpoint=dict(every_steps=1, keep=1))


class Scored(Toy):
    """Has the scores of the evaluations of steps 2, 4, ..., independent of the order of calls."""

    def run(self, params, step, after_batch=lambda: None):
        remaining_scores, self.scores = self.scores, iter([self.scores[step // 2 - 1]])
        evaluation = super().run(params, step, after_batch)
        self.scores = remaining_scores
        return evaluation


@pytest.mark.slow
@pytest.mark.parametrize("scores, stops_at, best, restarts", [
    ([5, 4, 4, 9, 9], 6, 2, (3, 5)),
    ([5, 5, 5, 9, 9], 6, 6, ()),  # an equal score is not better; of equal scores the last is used
    ([math.nan, math.nan, 1, 2, 3], 4, None, (3,)),
])  # fmt: skip
def test_a_run_stops_early_without_a_better_score(train_toy, tmp_path, scores, stops_at, best, restarts):
    """The state equals the state of a run with many stops; all checkpoints with scores except the best are deleted."""

    def task_of(scores):
        task = Scored(toy_config())
        task.scores = scores
        return task

    result = train_toy(task := task_of(scores), tmp_path / "straight", **PATIENT)
    assert (int(result.state.step), result.best_step, task.evaluated[-1]) == (stops_at, best, stops_at)
    assert checkpoint.steps(tmp_path / "straight") == sorted({best, stops_at} - {None})
    for step in restarts:
        stopped_run(functools.partial(train_toy, **PATIENT), task_of(scores), step)
    for _ in range(2):  # the second start reports the early stop
        task = task_of(scores)
        resumed = train_toy(task, **PATIENT)
        assert (resumed.best_step == best and task.evaluated in ([stops_at], [])) or not restarts
        assert all(map(np.array_equal, *(leaves(result_of_run.state).values() for result_of_run in (result, resumed))))


def test_a_longer_patience_resumes_a_stopped_run(train_toy):
    train_toy(Toy(toy_config(), scores=[5, 4, 4]), **PATIENT)
    result = train_toy(Toy(toy_config(), scores=[3, 6]), eval=dict(every_steps=2, patience=4))
    assert (int(result.state.step), result.best_step) == (10, 10)


def test_a_signal_before_an_evaluation_saves_without_evaluating(train_toy, tmp_path):
    straight = tmp_path / "straight"
    train_toy(Toy(toy_config()), workdir=straight)
    task = stopped_run(train_toy, Toy(toy_config()), 5)  # step 5 has an evaluation
    assert checkpoint.steps(tmp_path) == [5] and task.evaluated == []
    task = Toy(toy_config())
    train_toy(task)
    assert task.evaluated == [5, 10] and evaluated_steps(tmp_path) == evaluated_steps(straight) == [5, 10]


def test_an_interrupted_run_logs_equal_metrics(train_toy, tmp_path):
    """The run stops between two reports, which gives an additional report."""
    train_toy(Toy(toy_config()), tmp_path / "straight", log_every_steps=4)
    stopped_run(functools.partial(train_toy, log_every_steps=4), Toy(toy_config()), 6)
    train_toy(Toy(toy_config()), log_every_steps=4)

    def logged(workdir):
        timed = ("per_second", "wall/", "goodput/")
        return [{k: v for k, v in line.items() if not any(x in k for x in timed)} for line in read_metrics(workdir)]

    assert logged(tmp_path) == logged(tmp_path / "straight")
    assert [line["step"] for line in logged(tmp_path) if "train/loss" in line] == [4, 5, 8, 10]


def test_a_signal_ends_an_evaluation(train_toy, tmp_path):
    task = Toy(toy_config())
    evaluate = task.run

    def interrupted(params, step, after_batch):
        os.kill(os.getpid(), signal.SIGTERM)
        evaluate(params, step, after_batch)
        raise AssertionError("the evaluation continued")

    task.run = interrupted
    with pytest.raises(KeyboardInterrupt, match="stopped at step 5, during evaluation"):
        train_toy(task)
    assert checkpoint.steps(tmp_path) == [5] and evaluated_steps(tmp_path) == []
    train_toy(Toy(toy_config()))
    assert evaluated_steps(tmp_path) == [5, 10] and checkpoint.read_scores(tmp_path, 5) is not None


def test_a_run_at_the_last_step_does_not_repeat_the_evaluation(train_toy, tmp_path):
    train_toy(Toy(toy_config()))
    task = Toy(toy_config())
    assert train_toy(task).scores.score == 1 and task.evaluated == []
    assert evaluated_steps(tmp_path) == [5, 10]
    (tmp_path / "checkpoints/10/scores.json").unlink()  # killed between the two files
    train_toy(Toy(toy_config()))
    assert evaluated_steps(tmp_path) == [5, 10] and checkpoint.read_scores(tmp_path, 10) is not None


def test_no_scores_without_held_out_data(train_toy, tmp_path):
    result = train_toy(Toy(toy_config(), scores=None))
    assert result[1:] == (None, None, None) and checkpoint.steps(tmp_path) == [5, 10]


class Poisoned(Toy):
    """A task whose loss, or only the gradient of the loss, is NaN in some steps."""

    poisoned, what = (3, 7), "loss"

    def batches(self, start_step):
        for step, batch in enumerate(super().batches(start_step), start_step + 1):
            yield {**batch, "poison": np.full_like(batch["y"], step in self.poisoned)}

    def __call__(self, params, batch, dropout_keys=None):
        value, metrics = super().__call__(params, batch, dropout_keys)
        poison = batch["poison"].max()
        if self.what == "loss":
            return jnp.where(poison, jnp.nan, value), metrics
        return value + jnp.sqrt(value - jax.lax.stop_gradient(value) + 1 - poison), metrics  # the slope at 0


@pytest.mark.parametrize(
    "poisoned_value, message", [("loss", "of step 7 is nan"), ("gradient", "gradient norm (nan|inf)")]
)
def test_nan_stops_the_run_and_is_not_saved(tmp_path, poisoned_value, message):
    task = Poisoned(toy_config())
    task.what, task.poisoned = poisoned_value, range(7, 11)
    with pytest.raises(UserError, match=f"training diverged: .*{message}"):
        train_task(task, task.config, tmp_path, task.mesh)
    assert checkpoint.steps(tmp_path) == [5]


def test_non_finite_updates_can_be_skipped(tmp_path, capsys):
    config = toy_config()
    config.optimizer.skip_nonfinite = 1
    task = Poisoned(config)
    trained = train_task(task, config, tmp_path / "run", task.mesh)
    assert int(trained.state.step) == 10 and np.isfinite(jax.tree.leaves(trained.state.params)[0]).all()
    assert int(trained.state.opt_state[1].count) == 8
    lines = [line for line in capsys.readouterr().out.splitlines() if "skipped this update" in line]
    assert [re.search(r"loss of step (\d) is nan .*, 1 in a row", line)[1] for line in lines] == ["3", "7"]
    by_step = {line["step"]: line for line in read_metrics(tmp_path / "run") if "train/loss" in line}
    assert by_step[4]["train/skipped"] == 0.5 and by_step[2]["train/skipped"] == 0 < by_step[4]["train/loss"]
    for step in (3, 7):
        kept = np.load(tmp_path / f"run/nonfinite/step{step}-host0.npz")
        expected = next(itertools.islice(task.batches(0), step - 1, None))
        assert kept.keys() == expected.keys() and all(np.array_equal(kept[name], expected[name]) for name in kept)
    task = Poisoned(config)
    task.poisoned = (7, 8)
    with pytest.raises(UserError, match=r"training diverged: the loss of step 8 is nan"):
        train_task(task, config, tmp_path / "twice", task.mesh)


def test_the_loop_refuses_implicit_transfers(train_toy, monkeypatch):
    monkeypatch.setattr("bertjax.distributed.transfers.put_batch", lambda batch, mesh: batch)  # stays NumPy
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train_toy(Toy(toy_config()))


def test_a_run_can_start_from_changed_params(toy_program, tmp_path):
    config = toy_config()
    config.optimizer.learning_rate = 1e-20  # no updates: the result equals the initial params
    task = Toy(config)
    result = train_task(
        task, config, tmp_path, task.mesh, lambda params: jax.tree.map(lambda x: x + 1, params), toy_program
    )
    assert int(result.state.step) == 10
    assert min(float(x.mean()) for x in jax.tree.leaves(result.state.params)) > 0.9


def test_a_run_past_the_steps_of_the_config_is_refused(train_toy):
    train_toy(Toy(toy_config()))
    task = Toy(toy_config())
    task.total_steps = 7
    with pytest.raises(UserError, match="the checkpoint is at step 10, past the last step of the config, 7"):
        train_toy(task)


def test_a_checkpoint_without_optimizer_state_is_not_resumed(train_toy, tmp_path):
    """`convert --format=bertjax` writes such checkpoints."""
    checkpoint.write_params(tmp_path, {"dense": {"kernel": np.ones((3, 1)), "bias": np.ones(1)}})
    with pytest.raises(UserError, match=r"has no optimizer state, .* --config.init_checkpoint="):
        train_toy(Toy(toy_config()))


def test_the_final_checkpoint_of_a_trial_has_params_only(toy_program, tmp_path):
    task = Toy(toy_config())
    arguments = (task, toy_config(), tmp_path, task.mesh, None, toy_program)
    train_task(*arguments, save_final_opt_state=False)
    assert checkpoint.is_resumable(tmp_path, 5) and not checkpoint.is_resumable(tmp_path, 10)
    again = train_task(*arguments, save_final_opt_state=False)  # stopped before its result was written
    np.testing.assert_array_equal(
        again.state.params["dense"]["kernel"], checkpoint.read_params(tmp_path, 10)["dense"]["kernel"]
    )
    assert int(again.state.step) == 10


# Wall time.


class Slow(Toy):
    """Waits for its data and in its evaluations."""

    def batches(self, start_step):
        for batch in super().batches(start_step):
            time.sleep(0.02)
            yield batch

    def run(self, params, step, after_batch):
        time.sleep(0.3)
        return super().run(params, step, after_batch)


def test_the_log_has_the_shares_of_wall_time(train_toy, tmp_path, capsys):
    started = time.monotonic()
    train_toy(Slow(toy_config()))
    elapsed = time.monotonic() - started
    lines = read_metrics(tmp_path)
    reports, total = {line["step"]: line for line in lines if "train/loss" in line}, lines[-1]
    assert reports[2]["wall/evaluation"] == 0 < reports[2]["wall/data"]
    assert reports[6]["wall/evaluation"] > 0.3  # since step 5, after which the run has evaluated
    assert reports[6]["train/sequences_per_second"] > 16 / 0.3  # the 0.3 s of the evaluation are not counted
    assert total["goodput/evaluation"] * elapsed > 0.55 and total["goodput/data"] * elapsed > 0.15
    assert total["goodput/checkpoints"] > 0.001
    walls = {part: sum(line.get(f"wall/{part}", 0) for line in lines) for part in PARTS}
    for part in PARTS:
        assert total[f"goodput/{part}"] == pytest.approx(walls[part] / sum(walls.values())) and walls[part] >= 0
    assert reports[2]["wall/start"] > 0 == reports[4]["wall/start"] == reports[2]["wall/restart"]
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("wall time: ") and "% waiting for data, " in printed
    assert f"{total['goodput/evaluation']:.1%} evaluation" in printed
    assert "% compiling, " in printed and printed.endswith("% start-up")  # without a restart


@pytest.mark.slow
def test_a_step_that_waits_for_data_is_named(train_toy, tmp_path, capsys):
    class Stalling(Toy):
        total_steps = 14

        def batches(self, start_step):
            for step, batch in enumerate(super().batches(start_step)):
                time.sleep(1.2 * (step == 12))
                yield batch

    train_toy(Stalling(toy_config()))
    # A busy machine stalls other steps as well, but not because of data.
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "waiting for data took" in line]
    assert re.match(r"Step 1\d was slow \(1\.\d s, usually 0\.\d s\): waiting for data took 1\.\d s", line)
    train_toy(Stalling(toy_config()), tmp_path / "quiet", watchdog=0.0)
    assert "was slow" not in capsys.readouterr().out


def test_the_wall_time_of_all_processes_of_a_run_is_added_up(tmp_path):
    seconds = dict.fromkeys(PARTS, 1.0)
    first = MetricsWriter(tmp_path, 0, toy_config())
    for step in (2, 4, 6):
        first.write_with_wall_time(step, seconds, {})
    first.write_unreported(4, [{"loss": np.float32(0.1)}, {"loss": np.float32("nan")}], seconds)
    second = MetricsWriter(tmp_path, 4, toy_config())  # killed; resumes from step 4
    (one, other) = second.read_unreported(4)
    assert one == {"loss": np.float32(0.1)} and np.isnan(other["loss"])
    second.write_with_wall_time(6, seconds, {})
    third = MetricsWriter(tmp_path, 6, toy_config())
    for writer in (second, third):  # the seconds of step 6 were lost
        assert writer.wall_seconds == {**dict.fromkeys(PARTS, 2.0 + 1.0 + 1.0), "restart": 4.0 + len(PARTS)}
    assert third.read_unreported(6) == [] and not list(tmp_path.glob("unreported*"))


def profiled_steps(workdir, name):
    """Returns the steps in a profile, and the names of its events."""
    folder = workdir / "profile/plugins/profile" / name
    assert sorted(path.name for path in folder.iterdir()) == ["host0.trace.json.gz", "host0.xplane.pb"]
    data = jax.profiler.ProfileData.from_file(str(folder / "host0.xplane.pb"))
    events = [event for plane in data.planes for line in plane.lines for event in line.events]
    with gzip.open(folder / "host0.trace.json.gz") as file:
        assert "train" in {event.get("name") for event in json.load(file)["traceEvents"]}
    return sorted(dict(event.stats)["step_num"] for event in events if event.name == "train"), {e.name for e in events}


@pytest.mark.slow
def test_a_profile_shows_exactly_the_configured_steps(train_toy, tmp_path, capsys):
    stopped_run(functools.partial(train_toy, profile="4:9"), Toy(toy_config()), 5)
    steps, names = profiled_steps(tmp_path, "steps_4_9")
    assert steps == [4, 5] and any("train_step" in name for name in names)
    train_toy(Toy(toy_config()), profile="4:9")  # resumed: the remaining steps
    assert profiled_steps(tmp_path, "steps_6_9")[0] == [6, 7, 8, 9]
    assert f"profile of steps 6 to 9 in {tmp_path / 'profile'}" in capsys.readouterr().out


def test_a_run_resumed_after_the_profiled_steps_reports_the_missing_profile(train_toy, tmp_path, capsys):
    stopped_run(train_toy, Toy(toy_config()), 5)
    train_toy(Toy(toy_config()), profile="2:5")
    assert "config.profile = '2:5': no profile; this process runs steps 6 to 10" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_the_loop_blocks_at_start_and_end_of_a_profile(train_toy, monkeypatch):
    steps = []
    monkeypatch.setattr("jax.block_until_ready", lambda state: steps.append(int(state.step)))
    train_toy(Toy(toy_config()), profile="2:3")
    assert steps == [1, 3]
