"""The loop: resume, microbatches, meshes, learning, NaN, what is written where."""

import itertools
import json
import os
import signal
import subprocess
import sys

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
from bertjax.training.logging import read_metrics
from bertjax.training.loop import make_program, put_recipe, train
from bertjax.training.optimizer import make_schedule
from tests.conftest import one_device_mesh, tiny_config


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
    state, scores = train(task, config, workdir, task.mesh, program=program)
    return workdir, leaves(state), scores


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
            state, scores = train(task, config, tmp_path, task.mesh, program=program)
    _, expected, expected_scores = straight_run
    resumed = leaves(state)
    assert expected.keys() == resumed.keys()
    for name in expected:
        assert np.array_equal(expected[name], resumed[name]), name
    assert scores == expected_scores


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
    assert {f"eval/{name}" for name in scores} | {"step"} == last.keys()
    assert {"eval/unigram_loss", "eval/mlm_accuracy", "eval/nsp_accuracy"} <= last.keys()
    assert list((workdir / "tensorboard").iterdir())


def test_a_resumed_run_drops_the_lines_it_will_write_again(tmp_path):
    from bertjax.training.logging import MetricsWriter

    text = "".join(json.dumps({"step": step, "train/loss": 1.0}) + "\n" for step in (2, 4, 6))
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 7, "tra')
    writer = MetricsWriter(tmp_path, start_step=4)
    writer.write(6, {"train/loss": 2.0, "train/other": float("nan")})
    writer.close()
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[-1]["train/loss"] == 2.0 and lines[-1]["train/other"] is None


def test_the_latest_checkpoints_and_the_best_are_kept(records_folder, program, tmp_path):
    config = tiny_config(records=records_folder)
    config.eval.every_steps, config.checkpoint.every_steps, config.checkpoint.keep = 2, 1, 2
    task = make_task(records_folder, config)
    scores = iter([5.0, 1.0, 2.0, 3.0, 4.0])  # held-out losses of steps 2, 4, ..., 10
    task.evaluate = lambda params, step: {"mlm_loss": next(scores)}
    train(task, config, tmp_path, task.mesh, program=program)
    assert checkpoint.steps(tmp_path) == [4, 9, 10]


def first_step(task, config, total_steps):
    """(state, batch) -> (state, metrics), the state to begin with, and how many programs were compiled so far."""
    program = make_program(task, config, task.mesh)
    recipe = put_recipe(0, make_schedule(config.optimizer, total_steps), task.mesh)
    state = program.init(jax.random.key(0))
    return lambda *x: program.train_step(*x, recipe), state, program.train_step._cache_size


def two_steps(records_folder, mesh_sizes, microbatches):
    """Params and metrics after two steps of the first stage on a mesh (data, fsdp, tensor)."""
    config = tiny_config(records=records_folder)
    config.mesh.update(dict(zip(("data", "fsdp", "tensor"), mesh_sizes)))
    config.microbatches = microbatches
    config.model.update(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    mesh = make_mesh(config, jax.devices()[: int(np.prod(mesh_sizes))])
    task = make_task(records_folder, config, mesh)
    step, state, _ = first_step(task, config, 10)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        for batch in itertools.islice(task.batches(0), 2):
            state, metrics = step(state, put_batch(batch, mesh, 16))
    return leaves(state.params), jax.device_get(metrics)


@pytest.fixture(scope="module")
def on_one_device(records_folder):
    return two_steps(records_folder, (1, 1, 1), 1)


@pytest.mark.parametrize("mesh, microbatches", [((1, 1, 1), 4), ((8, 1, 1), 2), ((2, 4, 1), 1), ((2, 2, 2), 2)])
def test_devices_and_microbatches_change_nothing(records_folder, on_one_device, mesh, microbatches):
    """Nor what dropout draws."""
    params, metrics = two_steps(records_folder, mesh, microbatches)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], on_one_device[1][name], rtol=2e-5, err_msg=name)
    for name in params:
        np.testing.assert_allclose(params[name], on_one_device[0][name], atol=3e-5, err_msg=name)


def test_one_batch_is_learnt_by_heart(records_folder):
    config = tiny_config(records=records_folder)
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.optimizer.update(learning_rate=1e-2, warmup_steps=10, bias_correction=True)
    task = make_task(records_folder, config)
    step, state, _ = first_step(task, config, 300)
    batch = next(task.batches(0))
    for _ in range(250):
        state, metrics = step(state, batch)
    assert metrics["mlm_loss"] < 0.1 and metrics["nsp_loss"] < 0.1
    assert metrics["mlm_accuracy"] > 0.99 and metrics["nsp_accuracy"] > 0.99


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_no_number_stops_the_run_and_is_not_saved(records_folder, tmp_path, what):
    config = tiny_config(records=records_folder)
    task = make_task(records_folder, config)
    loss = task.loss

    def poisoned(params, batch, key=None):
        value, metrics = loss(params, batch, key)
        if batch["input_ids"].shape[1] == 64:  # stage 2, which begins with step 7
            # The root's slope at 0 is infinite.
            value = value * jnp.nan if what == "loss" else value + jnp.sqrt(value - jax.lax.stop_gradient(value))
        return value, metrics

    task.loss = poisoned
    which = "of step 7 is nan" if what == "loss" else "gradient norm (nan|inf)"
    with pytest.raises(UserError, match=f"training diverged: .*{which}"):
        train(task, config, tmp_path, task.mesh)
    assert checkpoint.steps(tmp_path) == [5]


def test_no_transfer_between_host_and_devices_hides_in_a_step(records_folder):
    config = tiny_config(records=records_folder)
    task = make_task(records_folder, config)
    step, state, programs = first_step(task, config, 10)
    batches = [put_batch(batch, task.mesh, 16) for batch in itertools.islice(task.batches(0), 3)]
    state, _ = step(state, batches[0])
    with jax.transfer_guard("disallow"):
        for batch in batches[1:]:
            state, metrics = step(state, batch)
    assert np.isfinite(metrics["loss"]) and programs() == 1


def test_the_loop_refuses_a_transfer_that_nobody_asked_for(records_folder, tmp_path, monkeypatch):
    config = tiny_config(records=records_folder)
    task = make_task(records_folder, config)
    monkeypatch.setattr("bertjax.training.loop.put_batch", lambda batch, mesh, batch_size: batch)  # stays NumPy
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train(task, config, tmp_path, task.mesh)


def test_training_runs_without_tensorflow(tmp_path):
    """Model, loop and checkpoints on NumPy batches, where importing TensorFlow is an error."""
    script = f"""
import sys
sys.modules["tensorflow"] = None
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
            input_ids=ids, input_mask=np.ones_like(ids), segment_ids=np.zeros_like(ids),
            masked_lm_positions=np.tile(np.arange(5, dtype=np.int32), (16, 1)), masked_lm_ids=ids[:, :5],
            masked_lm_weights=np.ones((16, 5), np.float32), next_sentence_labels=ids[:, 0] % 2,
            next_sentence_weights=np.ones(16, np.float32),
        )

class NumpyTask(Pretraining):
    batches = batches
    def evaluate(self, params, step):
        return {{}}

import jax
mesh = make_mesh(config, jax.devices()[:1])
state, _ = train(NumpyTask(config, mesh, None), config, {str(tmp_path)!r}, mesh)
assert int(state.step) == 4 and sys.modules["tensorflow"] is None
print("trained")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip().endswith("trained"), result.stderr[-2000:]


def test_a_run_can_start_from_other_params(records_folder, program, tmp_path):
    config = tiny_config(records=records_folder)
    config.optimizer.learning_rate = 1e-20  # nothing moves: what comes out is what went in
    task = make_task(records_folder, config)
    state, _ = train(task, config, tmp_path, task.mesh, lambda params: jax.tree.map(lambda x: x + 1, params), program)
    assert int(state.step) == 10
    assert min(float(x.mean()) for x in jax.tree.leaves(state.params)) > 0.9


def test_a_run_that_is_past_the_configs_steps_is_refused(records_folder, straight_run):
    config = tiny_config(records=records_folder)
    config.stages.long.steps = 1
    task = make_task(records_folder, config)
    with pytest.raises(UserError, match="is at step 10, past the config's 7"):
        train(task, config, straight_run[0], task.mesh)
