"""The loop: resume, microbatches, meshes, learning, NaN, what is written where."""

import gzip
import itertools
import json
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

from bertjax.config import UserError
from bertjax.sharding.mesh import make_mesh, put_batch
from bertjax.sharding.rules import RULES
from bertjax.tasks.pretraining import Pretraining
from bertjax.training import checkpoint
from bertjax.training.clocks import PARTS
from bertjax.training.logging import MetricsWriter
from bertjax.training.loop import train
from bertjax.training.profile import profiled
from bertjax.training.schedules import make_schedule
from bertjax.training.sinks.jsonl import read_metrics
from bertjax.training.step import make_program, put_hyperparameters
from tests.conftest import one_device_mesh, tiny_config
from tests.training.toy import Toy, toy_config


def make_task(records_folder, config=None, mesh=None):
    config = config or tiny_config(records=records_folder)
    return Pretraining(config, mesh or one_device_mesh(config), records_folder)


def leaves(tree):
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def program(records_folder):
    """Of `tiny_config`, for all tests that leave model and loss as they are."""
    task = make_task(records_folder)
    return make_program(task, task.config, task.mesh)


@pytest.fixture(scope="module")
def straight_run(records_folder, program, tmp_path_factory):
    """All ten steps in one go: workdir and final state."""
    workdir = tmp_path_factory.mktemp("straight")
    config = tiny_config(records=records_folder)
    task = make_task(records_folder, config)
    result = train(task, config, workdir, task.mesh, program=program)
    return workdir, leaves(result.state), result.scores


def test_a_resumed_run_equals_a_straight_one_bit_for_bit(records_folder, program, straight_run, tmp_path):
    """Stopped after step 5 by a signal, in the first stage, and again after step 8, in the second."""
    config = tiny_config(records=records_folder)
    for stop_after in (5, 8, None):
        task = make_task(records_folder, config)
        if stop_after:
            stop_when(task, stop_after)
            with pytest.raises(KeyboardInterrupt, match=f"stopped at step {stop_after}"):
                train(task, config, tmp_path, task.mesh, program=program)
            assert checkpoint.steps(tmp_path)[-1] == stop_after
        else:
            result = train(task, config, tmp_path, task.mesh, program=program)
    _, expected, expected_scores = straight_run
    resumed = leaves(result.state)
    assert expected.keys() == resumed.keys()
    for name in expected:
        assert np.array_equal(expected[name], resumed[name]), name
    assert result.scores == expected_scores


def stop_when(task, step):
    """A SIGTERM while the batch of `step` is on its way."""
    batches = task.batches

    def interrupted(start):
        for number, batch in enumerate(batches(start), start + 1):
            if number == step + 1:  # the loop fetches one batch ahead
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    task.batches = interrupted


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
    events = tensorboard_events(workdir)
    assert [(step, value) for step, tag, value in events if tag == "train/loss"] == [
        (line["step"], pytest.approx(line["train/loss"])) for line in train_lines
    ]


def tensorboard_events(workdir):
    """(step, tag, value) of the events, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    (path,) = (workdir / "tensorboard").iterdir()
    events = LegacyEventFileLoader(str(path)).Load()
    return [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]


def first_step(task, config, total_steps, program=None):
    """(state, batch) -> (state, metrics), and the state to begin with."""
    program = program or make_program(task, config, task.mesh)
    hyperparameters = put_hyperparameters(0, make_schedule(config.optimizer, total_steps), task.mesh)
    state = program.init(jax.random.key(0))
    return lambda *x: program.train_step(*x, hyperparameters), state


def two_steps(records_folder, mesh_sizes, microbatches, program=None, dtype="float32"):
    """Params and metrics after two steps of the first stage on a mesh (data, fsdp, tensor)."""
    config = tiny_config(records=records_folder)
    config.dtype = dtype
    config.mesh.update(dict(zip(("data", "fsdp", "tensor"), mesh_sizes)))
    config.microbatches = microbatches
    mesh = make_mesh(config, jax.devices()[: int(np.prod(mesh_sizes))])
    task = make_task(records_folder, config, mesh)
    step, state = first_step(task, config, 10, program)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        for batch in itertools.islice(task.batches(0), 2):
            state, metrics = step(state, put_batch(batch, mesh))
    return leaves(state.params), jax.device_get(metrics)


@pytest.fixture(scope="module")
def on_one_device(records_folder, program):
    return two_steps(records_folder, (1, 1, 1), 1, program)


@pytest.mark.slow
@pytest.mark.parametrize("mesh, microbatches", [((4, 1, 1), 4), ((2, 4, 1), 1), ((2, 2, 2), 2)])
def test_devices_and_microbatches_change_nothing(records_folder, on_one_device, mesh, microbatches):
    """Nor what dropout draws."""
    assert_same_steps(two_steps(records_folder, mesh, microbatches), on_one_device)


@pytest.mark.slow
def test_devices_change_nothing_where_products_take_bfloat16(records_folder, on_one_device):
    one = two_steps(records_folder, (1, 1, 1), 1, dtype="bfloat16")
    assert_same_steps(two_steps(records_folder, (2, 2, 2), 2, dtype="bfloat16"), one)
    losses = [float(metrics["loss"]) for _, metrics in (one, on_one_device)]
    assert 1e-6 < abs(losses[0] - losses[1]) < 0.01  # it is bfloat16


def assert_same_steps(found, expected):
    """Of `two_steps`."""
    for name in found[1]:
        np.testing.assert_allclose(found[1][name], expected[1][name], rtol=2e-5, err_msg=name)
    for name in found[0]:
        np.testing.assert_allclose(found[0][name], expected[0][name], atol=3e-5, err_msg=name)


@pytest.mark.slow
def test_one_batch_is_learnt_by_heart(records_folder):
    config = tiny_config(records=records_folder)
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.optimizer.update(learning_rate=1e-2, warmup_steps=10, bias_correction=True)
    task = make_task(records_folder, config)
    step, state = first_step(task, config, 300)
    batch = next(task.batches(0))
    for _ in range(250):
        state, metrics = step(state, batch)
    assert metrics["mlm_loss"] < 0.1 and metrics["nsp_loss"] < 0.1
    assert metrics["mlm_accuracy"] > 0.99 and metrics["nsp_accuracy"] > 0.99


def test_no_transfer_between_host_and_devices_hides_in_a_step(records_folder, program):
    task = make_task(records_folder)
    hyperparameters = put_hyperparameters(0, make_schedule(task.config.optimizer, 10), task.mesh)
    state = program.init(jax.random.key(0))
    batches = [put_batch(batch, task.mesh) for batch in itertools.islice(task.batches(0), 3)]
    state, _ = program.train_step(state, batches[0], hyperparameters)
    compiled = program.train_step._cache_size()
    with jax.transfer_guard("disallow"):
        for batch in batches[1:]:
            state, metrics = program.train_step(state, batch, hyperparameters)
    assert np.isfinite(metrics["loss"]) and program.train_step._cache_size() == compiled


@pytest.mark.slow
def test_training_runs_without_tensorflow(tmp_path):
    """Model, loop, checkpoints and TensorBoard on NumPy batches: nothing imports it."""
    script = f"""
import sys
import numpy as np
from bertjax.config import pretraining_config, named_stages, stage
from bertjax.sharding.mesh import make_mesh
from bertjax.training.loop import train
from tests.conftest import tiny_config
from bertjax.tasks.pretraining import Pretraining

config = tiny_config()
config.stages = named_stages(short=stage(4, 32, 5))
config.mesh.data = 1

def batches(self, start):
    for step in range(start, 4):
        rng = np.random.default_rng(step)
        ids = rng.integers(5, 150, (16, 32), dtype=np.int32)
        yield dict(
            input_ids=ids, segments=np.ones_like(ids), token_types=np.zeros_like(ids),
            word_positions=np.tile(np.arange(5, dtype=np.int32), (16, 1)), word_ids=ids[:, :5],
            word_weights=np.ones((16, 5), np.float32), pair_labels=ids[:, 0] % 2,
            sequence_weights=np.ones(16, np.float32),
        )

class NumpyTask(Pretraining):
    batches = batches
    def evaluate(self, params, step, after_batch):
        return None

import jax
mesh = make_mesh(config, jax.devices()[:1])
state, *_ = train(NumpyTask(config, mesh, None), config, {str(tmp_path)!r}, mesh)
assert int(state.step) == 4 and not {{"tensorflow", "pyarrow"}} & set(sys.modules)
print("trained")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip().endswith("trained"), result.stderr[-2000:]


def test_what_pretraining_says_of_its_wall_time_adds_up(straight_run):
    *_, last = lines = read_metrics(straight_run[0])
    walls = [line for line in lines if "wall/steps" in line]
    assert min(line[f"wall/{part}"] for line in walls for part in PARTS) >= 0
    total = sum(line[f"wall/{part}"] for line in walls for part in PARTS)
    for part in PARTS:
        assert last[f"goodput/{part}"] == pytest.approx(sum(line[f"wall/{part}"] for line in walls) / total)
    assert sum(last[f"goodput/{part}"] for part in PARTS) == pytest.approx(1)
    assert walls[0]["wall/restart"] > 0 == walls[1]["wall/restart"] < walls[0]["wall/compile"]


# What any task can show, with one that compiles in a moment.


@pytest.fixture(scope="module")
def toy_program():
    task = Toy(toy_config())
    return make_program(task, task.config, task.mesh)


@pytest.fixture
def train_toy(toy_program, tmp_path):
    """(task, **fields of the config) -> what `train` returns, in the test's folder."""

    def run(task, workdir=tmp_path, **fields):
        return train(task, toy_config(**fields), workdir, task.mesh, program=toy_program)

    return run


def evaluated_steps(workdir):
    return [line["step"] for line in read_metrics(workdir) if "eval/score" in line]


def test_a_resumed_run_drops_the_lines_it_will_write_again(tmp_path):
    text = "".join(json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in (2, 4, 6))
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 7, "tra')
    writer = MetricsWriter(tmp_path, 4, toy_config())
    writer.write(6, {"train/loss": 2.0, "train/other": float("nan")})
    writer.flush()
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[-1]["train/loss"] == 2.0 and lines[-1]["train/other"] is None


def test_metrics_are_not_rewritten_where_nothing_is_dropped(tmp_path):
    """A crash while the file is rewritten must not cost the lines of a million steps."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "train/loss": 1.0}\n')
    before = path.stat()
    MetricsWriter(tmp_path, 2, toy_config()).flush()
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    MetricsWriter(tmp_path, 1, toy_config()).flush()  # drops a line: a new file takes the place of the old one
    assert path.stat().st_ino != before.st_ino and path.read_text() == ""


KEPT = dict(eval=dict(every_steps=2), checkpoint=dict(every_steps=1, keep=2))


@pytest.mark.slow
def test_the_latest_checkpoints_and_the_best_are_kept(train_toy, tmp_path):
    result = train_toy(Toy(toy_config(), scores=[1, 5, 4, 3, 2]), **KEPT)
    assert checkpoint.steps(tmp_path) == [4, 9, 10]
    assert (result.best_step, result.best.score, result.scores.score) == (4, 5, 2)


def test_checkpoints_of_regular_steps_are_kept(train_toy, tmp_path):
    kept = dict(every_steps=1, keep=1, keep_every=3)
    train_toy(Toy(toy_config(), scores=[1, 5, 4, 3, 2]), eval=KEPT["eval"], checkpoint=kept)
    assert checkpoint.steps(tmp_path) == [3, 4, 6, 9, 10]


def test_what_the_last_evaluation_makes_superfluous_goes_too(train_toy, tmp_path):
    train_toy(
        Toy(toy_config(), scores=[1, 5, 4, 3, 6]), eval=dict(every_steps=2), checkpoint=dict(every_steps=1, keep=1)
    )
    assert checkpoint.steps(tmp_path) == [10]


@pytest.mark.slow
def test_the_best_checkpoint_survives_a_restart(train_toy, tmp_path):
    """Scores are read back, and what was the best before is still compared with what comes."""
    task = Toy(toy_config(), scores=[1, 5])
    stop_when(task, 5)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 5"):
        train_toy(task, **KEPT)
    assert checkpoint.best_step(tmp_path) == 4
    train_toy(Toy(toy_config(), scores=[4, 3, 2]), **KEPT)
    assert checkpoint.steps(tmp_path) == [4, 9, 10] and checkpoint.best_step(tmp_path) == 4
    assert checkpoint.read_scores(tmp_path, 4).decided == {"threshold": pytest.approx(3.14159, abs=1e-4)}
    assert (tmp_path / "predictions.json").read_text() == "4\n"  # those of the best


@pytest.mark.slow
@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_not_the_best(train_toy, tmp_path, score):
    train_toy(Toy(toy_config(), scores=[1, 5, score, 3, score]), **KEPT)
    assert checkpoint.steps(tmp_path) == [4, 9, 10] and checkpoint.best_step(tmp_path) == 4
    assert checkpoint.read_scores(tmp_path, 10).scores == {"score": None}


def test_scores_on_different_data_are_not_compared(train_toy, tmp_path):
    """A loss at length 512 is lower than one at length 128, and no better for that."""
    task = Toy(toy_config(), scores=[9, 8, 1, 2, 1], measured_on="length 32")
    evaluate = task.evaluate

    def two_lengths(params, step, after_batch):
        task.measured_on = "length 32" if step < 6 else "length 64"
        return evaluate(params, step, after_batch)

    task.evaluate = two_lengths
    train_toy(task, **KEPT)
    assert checkpoint.best_step(tmp_path) == 8 and checkpoint.steps(tmp_path) == [8, 9, 10]


PATIENT = dict(eval=dict(every_steps=2, patience=2), checkpoint=dict(every_steps=1, keep=1))


class Scored(Toy):
    """With the scores of the evaluations of steps 2, 4, ..., whenever they are made."""

    def evaluate(self, params, step, after_batch=lambda: None):
        given, self.scores = self.scores, iter([self.scores[step // 2 - 1]])
        found = super().evaluate(params, step, after_batch)
        self.scores = given
        return found


@pytest.mark.slow
@pytest.mark.parametrize("scores, stops_at, best", [
    ([5, 4, 4, 9, 9], 6, 2),
    ([5, 5, 5, 9, 9], 6, 6),  # as good is not better; of equal ones the last is used
    ([4, 5, 3, 5, 9], 8, 8),
    ([float("nan"), float("nan"), 1, 2, 3], 4, None),
    ([1, float("nan"), 2, 1, 1], 10, 6),
])  # fmt: skip
def test_a_run_ends_when_it_waits_too_long_for_a_better_score(train_toy, tmp_path, scores, stops_at, best):
    """With the state of a run that was stopped before every step, whose scores of all but the best are deleted."""

    def task_of(scores):
        task = Scored(toy_config())
        task.scores = scores
        return task

    result = train_toy(task := task_of(scores), tmp_path / "straight", **PATIENT)
    assert (int(result.state.step), result.best_step, task.evaluated[-1]) == (stops_at, best, stops_at)
    assert checkpoint.steps(tmp_path / "straight") == sorted({best, stops_at} - {None})
    for step in range(1, stops_at):
        task = task_of(scores)
        stop_when(task, step)
        with pytest.raises(KeyboardInterrupt, match=f"stopped at step {step}"):
            train_toy(task, **PATIENT)
    for _ in range(2):  # the second time it knows that it has ended
        task = task_of(scores)
        resumed = train_toy(task, **PATIENT)
        assert resumed.best_step == best and task.evaluated in ([stops_at], [])
        assert all(map(np.array_equal, *(leaves(each.state).values() for each in (result, resumed))))


def test_a_longer_patience_goes_on(train_toy):
    train_toy(Toy(toy_config(), scores=[5, 4, 4]), **PATIENT)
    result = train_toy(Toy(toy_config(), scores=[3, 6]), eval=dict(every_steps=2, patience=4))
    assert (int(result.state.step), result.best_step) == (10, 10)


def test_a_signal_before_an_evaluation_saves_and_does_not_evaluate(train_toy, tmp_path):
    straight = tmp_path / "straight"
    train_toy(Toy(toy_config()), workdir=straight)
    task = Toy(toy_config())
    stop_when(task, 5)  # step 5 is to be evaluated
    with pytest.raises(KeyboardInterrupt, match="stopped at step 5"):
        train_toy(task)
    assert checkpoint.steps(tmp_path) == [5] and task.evaluated == []
    task = Toy(toy_config())
    train_toy(task)
    assert task.evaluated == [5, 10] and evaluated_steps(tmp_path) == evaluated_steps(straight) == [5, 10]


def test_what_a_stopped_run_logs_is_what_it_would_have_logged(train_toy, tmp_path):
    """Stopped between two reports, at a step of its own."""
    train_toy(Toy(toy_config()), tmp_path / "straight", log_every_steps=4)
    task = Toy(toy_config())
    batches = task.batches

    def interrupted(start):
        for step, batch in enumerate(batches(start), 1):
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    task.batches = interrupted
    with pytest.raises(KeyboardInterrupt, match=r"stopped at step [67]"):
        train_toy(task, log_every_steps=4)
    train_toy(Toy(toy_config()), log_every_steps=4)

    def logged(workdir):
        timed = ("per_second", "wall/", "goodput/")
        return [{k: v for k, v in line.items() if not any(x in k for x in timed)} for line in read_metrics(workdir)]

    assert logged(tmp_path) == logged(tmp_path / "straight")
    assert [line["step"] for line in logged(tmp_path) if "train/loss" in line] == [4, 5, 8, 10]


def test_a_signal_during_an_evaluation_ends_it(train_toy, tmp_path):
    task = Toy(toy_config())
    evaluate = task.evaluate

    def interrupted(params, step, after_batch):
        os.kill(os.getpid(), signal.SIGTERM)
        evaluate(params, step, after_batch)
        raise AssertionError("the evaluation went on")

    task.evaluate = interrupted
    with pytest.raises(KeyboardInterrupt, match="stopped at step 5, during evaluation"):
        train_toy(task)
    assert checkpoint.steps(tmp_path) == [5] and evaluated_steps(tmp_path) == []
    train_toy(Toy(toy_config()))
    assert evaluated_steps(tmp_path) == [5, 10] and checkpoint.read_scores(tmp_path, 5) is not None


def test_a_run_at_its_last_step_does_not_write_its_evaluation_twice(train_toy, tmp_path):
    train_toy(Toy(toy_config()))
    task = Toy(toy_config())
    assert train_toy(task).scores.score == 1 and task.evaluated == []
    assert evaluated_steps(tmp_path) == [5, 10]
    (tmp_path / "checkpoints/10/scores.json").unlink()  # killed between the two files
    train_toy(Toy(toy_config()))
    assert evaluated_steps(tmp_path) == [5, 10] and checkpoint.read_scores(tmp_path, 10) is not None


def test_where_nothing_is_held_out_nothing_is_scored(train_toy, tmp_path):
    result = train_toy(Toy(toy_config(), scores=None))
    assert result[1:] == (None, None, None) and checkpoint.steps(tmp_path) == [5, 10]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_no_number_stops_the_run_and_is_not_saved(tmp_path, what):
    class Poisoned(Toy):
        def batches(self, start_step):
            for step, batch in enumerate(super().batches(start_step), start_step + 1):
                yield {**batch, "poison": np.full_like(batch["y"], step >= 7)}

        def loss(self, params, batch, dropout_keys=None):
            value, metrics = super().loss(params, batch, dropout_keys)
            poison = batch["poison"].max()
            if what == "loss":
                return jnp.where(poison, jnp.nan, value), metrics
            return value + jnp.sqrt(value - jax.lax.stop_gradient(value) + 1 - poison), metrics  # its slope at 0

    task = Poisoned(toy_config())
    which = "of step 7 is nan" if what == "loss" else "gradient norm (nan|inf)"
    with pytest.raises(UserError, match=f"training diverged: .*{which}"):
        train(task, task.config, tmp_path, task.mesh)
    assert checkpoint.steps(tmp_path) == [5]


class Poisoned(Toy):
    """Its loss is no number in these steps."""

    poisoned = (3, 7)

    def batches(self, start_step):
        for step, batch in enumerate(super().batches(start_step), start_step + 1):
            yield {**batch, "poison": np.full_like(batch["y"], step in self.poisoned)}

    def loss(self, params, batch, dropout_keys=None):
        value, metrics = super().loss(params, batch, dropout_keys)
        return jnp.where(batch["poison"].max(), jnp.nan, value), metrics


def test_updates_that_are_not_finite_can_be_left_out(tmp_path, capsys):
    config = toy_config()
    config.optimizer.skip_nonfinite = 1
    task = Poisoned(config)
    trained = train(task, config, tmp_path / "run", task.mesh)
    assert int(trained.state.step) == 10 and np.isfinite(jax.tree.leaves(trained.state.params)[0]).all()
    assert int(trained.state.opt_state[1].count) == 8
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
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
        train(task, config, tmp_path / "twice", task.mesh)


def test_the_loop_refuses_a_transfer_that_nobody_asked_for(train_toy, monkeypatch):
    monkeypatch.setattr("bertjax.sharding.streams.put_batch", lambda batch, mesh: batch)  # stays NumPy
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train_toy(Toy(toy_config()))


def test_a_run_can_start_from_other_params(toy_program, tmp_path):
    config = toy_config()
    config.optimizer.learning_rate = 1e-20  # nothing moves: what comes out is what went in
    task = Toy(config)
    result = train(task, config, tmp_path, task.mesh, lambda params: jax.tree.map(lambda x: x + 1, params), toy_program)
    assert int(result.state.step) == 10
    assert min(float(x.mean()) for x in jax.tree.leaves(result.state.params)) > 0.9


def test_a_run_that_is_past_the_configs_steps_is_refused(train_toy):
    train_toy(Toy(toy_config()))
    task = Toy(toy_config())
    task.total_steps = 7
    with pytest.raises(UserError, match="is at step 10, past the config's 7"):
        train_toy(task)


def test_params_alone_are_not_resumed(train_toy, tmp_path):
    """As `convert --format=bertjax` writes them."""
    checkpoint.write_params(tmp_path, {"dense": {"kernel": np.ones((3, 1)), "bias": np.ones(1)}})
    with pytest.raises(UserError, match=r"holds params without the optimizer's state, .* --config.init_checkpoint="):
        train_toy(Toy(toy_config()))


def test_a_run_of_a_search_ends_with_params_alone(toy_program, tmp_path):
    task = Toy(toy_config())
    arguments = (task, toy_config(), tmp_path, task.mesh, None, toy_program)
    train(*arguments, resumable_at_end=False)
    assert checkpoint.is_resumable(tmp_path, 5) and not checkpoint.is_resumable(tmp_path, 10)
    again = train(*arguments, resumable_at_end=False)  # stopped before its result was written
    np.testing.assert_array_equal(
        again.state.params["dense"]["kernel"], checkpoint.read_params(tmp_path, 10)["dense"]["kernel"]
    )
    assert int(again.state.step) == 10


# Where the time goes.


class Slow(Toy):
    """Waits for its data and in its evaluations."""

    def batches(self, start_step):
        for batch in super().batches(start_step):
            time.sleep(0.02)
            yield batch

    def evaluate(self, params, step, after_batch):
        time.sleep(0.3)
        return super().evaluate(params, step, after_batch)


def test_the_log_says_where_the_wall_time_goes(train_toy, tmp_path, capsys):
    started = time.monotonic()
    train_toy(Slow(toy_config()))
    elapsed = time.monotonic() - started
    lines = read_metrics(tmp_path)
    reports, total = {line["step"]: line for line in lines if "train/loss" in line}, lines[-1]
    assert reports[2]["wall/evaluation"] == 0 < reports[2]["wall/data"]
    assert reports[6]["wall/evaluation"] > 0.3  # since step 5, after which the run has evaluated
    assert reports[6]["train/sequences_per_second"] > 16 / 0.3  # the evaluation's 0.3 s are not counted
    assert total["goodput/evaluation"] * elapsed > 0.55 and total["goodput/data"] * elapsed > 0.15
    assert total["goodput/checkpoints"] > 0.001
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed.startswith("wall time: ") and "% waiting for data, " in printed
    assert f"{total['goodput/evaluation']:.1%} evaluation" in printed


@pytest.mark.slow
def test_a_step_that_waits_for_data_is_named(train_toy, tmp_path, capsys):
    class Stalling(Toy):
        total_steps = 20

        def batches(self, start_step):
            for step, batch in enumerate(super().batches(start_step)):
                time.sleep(1.2 * (step == 12))
                yield batch

    train_toy(Stalling(toy_config()))
    # A busy machine stalls other steps as well, but not for data.
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "waiting for: data" in line]
    assert re.match(r"host 0: step 1\d took 1\.\d s, \d+ times the median, waiting for: data 1\.\d s", line)
    train_toy(Stalling(toy_config()), tmp_path / "quiet", watchdog=0.0)
    assert "times the median" not in capsys.readouterr().out


def test_the_wall_time_of_all_processes_of_a_run_is_added_up(tmp_path):
    seconds = dict.fromkeys(PARTS, 1.0)
    first = MetricsWriter(tmp_path, 0, toy_config())
    for step in (2, 4, 6):
        first.write_wall(step, seconds, {})
    first.keep_unreported(4, [{"loss": np.float32(0.1)}, {"loss": np.float32("nan")}], seconds)
    second = MetricsWriter(tmp_path, 4, toy_config())  # killed, it goes on from step 4
    (one, other) = second.unreported(4)
    assert one == {"loss": np.float32(0.1)} and np.isnan(other["loss"])
    second.write_wall(6, seconds, {})
    third = MetricsWriter(tmp_path, 6, toy_config())
    for writer in (second, third):  # six seconds of step 6 were spent for nothing
        assert writer.wall == {**dict.fromkeys(PARTS, 2.0 + 1.0 + 1.0), "restart": 4.0 + 6.0}
    assert third.unreported(6) == [] and not list(tmp_path.glob("unreported*"))


def profiled_steps(workdir, name):
    """The steps that a profile shows, and the names of its events."""
    folder = workdir / "profile/plugins/profile" / name
    assert sorted(path.name for path in folder.iterdir()) == ["host0.trace.json.gz", "host0.xplane.pb"]
    data = jax.profiler.ProfileData.from_file(str(folder / "host0.xplane.pb"))
    events = [event for plane in data.planes for line in plane.lines for event in line.events]
    with gzip.open(folder / "host0.trace.json.gz") as file:
        assert "train" in {event.get("name") for event in json.load(file)["traceEvents"]}
    return sorted(dict(event.stats)["step_num"] for event in events if event.name == "train"), {e.name for e in events}


@pytest.mark.slow
def test_a_profile_shows_whole_steps_and_no_others(train_toy, tmp_path, capsys):
    train_toy(Toy(toy_config()), profile="3:4")
    steps, names = profiled_steps(tmp_path, "steps_3_4")
    assert steps == [3, 4] and any("train_step" in name for name in names)
    assert f"profile of steps 3 to 4 in {tmp_path / 'profile'}" in capsys.readouterr().out
    assert int(train_toy(Toy(toy_config())).state.step) == 10


@pytest.mark.slow
def test_a_signal_closes_the_profile(train_toy, tmp_path):
    task = Toy(toy_config())
    stop_when(task, 5)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 5"):
        train_toy(task, profile="4:9")
    assert profiled_steps(tmp_path, "steps_4_9")[0] == [4, 5]
    train_toy(Toy(toy_config()), profile="4:9")  # resumed: the rest of them
    assert profiled_steps(tmp_path, "steps_6_9")[0] == [6, 7, 8, 9]


def test_a_run_that_resumes_behind_its_profile_says_so(train_toy, tmp_path, capsys):
    task = Toy(toy_config())
    stop_when(task, 5)
    with pytest.raises(KeyboardInterrupt):
        train_toy(task)
    train_toy(Toy(toy_config()), profile="2:5")
    assert "config.profile = '2:5': no profile, this process runs steps 6 to 10" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_the_devices_are_finished_where_a_profile_begins_and_ends(tmp_path):
    seen, finished = [], []
    with profiled(range(1, 6), "2:3", tmp_path, lambda: finished.append(list(seen)), print) as steps:
        for step in steps:
            seen.append(step)
    assert seen == [1, 2, 3, 4, 5] and finished == [[1], [1, 2, 3]]


def test_without_a_profile_the_loop_iterates_over_a_plain_range(tmp_path):
    """So that nothing is added to a step."""
    with profiled(range(1, 10), "", tmp_path, pytest.fail, pytest.fail) as steps:
        assert steps == range(1, 10)
