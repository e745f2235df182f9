"""What outsiders register is used like ours: trained with, stopped and resumed."""

import numpy as np
import pytest

from bertjax import tasks
from bertjax.config import UserError
from bertjax.training import checkpoint, optimizers, sinks
from bertjax.training.loop import train
from bertjax.training.sinks.jsonl import read_metrics
from tests.conftest import tiny_config
from tests.training import own_parts
from tests.training.test_loop import leaves, stop_when
from tests.training.toy import Toy, toy_config


@pytest.fixture(autouse=True)
def registered():
    with own_parts.registered():
        yield


def test_they_train_and_a_resumed_run_equals_a_straight_one(tmp_path):
    config = own_parts.used_in(toy_config())
    straight = train(task := Toy(config), config, tmp_path / "straight", task.mesh)
    for stop_after in (7, None):
        task = Toy(config)
        if stop_after:
            stop_when(task, stop_after)
            with pytest.raises(KeyboardInterrupt):
                train(task, config, tmp_path / "run", task.mesh)
            assert checkpoint.steps(tmp_path / "run")[-1] == stop_after
        else:
            resumed = train(task, config, tmp_path / "run", task.mesh)
    expected, found = leaves(straight.state), leaves(resumed.state)
    assert expected.keys() == found.keys() and any("trace" in name for name in found)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)

    # The same steps by hand.
    params = {"dense": {"kernel": np.zeros((3, 1)), "bias": np.zeros(1)}}
    trace = {"kernel": np.zeros((3, 1)), "bias": np.zeros(1)}
    for step, batch in enumerate(Toy(config).batches(0)):
        x, y, dense = batch["x"].astype(float), batch["y"].astype(float), params["dense"]
        error = 2 * ((x @ dense["kernel"])[:, 0] + dense["bias"] - y) / len(y)
        gradient = {"kernel": x.T @ error[:, None], "bias": error.sum(keepdims=True)}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        for name, decay in (("kernel", 0.01), ("bias", 0.0)):
            trace[name] = gradient[name] / max(norm, 1) + 0.9 * trace[name]
            dense[name] = dense[name] - 0.01 * (1 - step % 4 / 4) * (trace[name] + decay * dense[name])
    for name, value in params["dense"].items():
        np.testing.assert_allclose(straight.state.params["dense"][name], value, rtol=1e-5)


def test_a_sink_gets_every_number_once_and_is_told_what_is_void(tmp_path):
    config = own_parts.used_in(toy_config())
    task = Toy(config)
    stop_when(task, 7)
    with pytest.raises(KeyboardInterrupt):
        train(task, config, tmp_path, task.mesh)
    train(task := Toy(config), config, tmp_path, task.mesh)
    first, second = (tmp_path / "table.txt").read_text().split("after 7\n")
    assert first.startswith("after 0\n") and first.endswith("closed\n") and second.endswith("closed\n")
    lines = [line.split() for line in (first + second).splitlines() if line[0].isdigit()]
    written = [(int(step), name) for step, name, _ in lines]
    assert written == [(line["step"], name) for line in read_metrics(tmp_path) for name in line if name != "step"]
    assert [step for step, name in written if name == "train/loss"] == [2, 4, 5, 6, 8, 10]


def test_tensorboard_leaves_out_what_a_resumed_run_writes_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = toy_config()
    for start, values in ((0, {2: 1.0, 4: 2.0, 6: 3.0}), (4, {6: 4.0, 8: 5.0})):
        sink = sinks.SINKS.get("tensorboard")(tmp_path, start, config)
        for step, value in values.items():
            sink.write(step, {"train/loss": value})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (2, 1.0), (4, 2.0), (6, 4.0), (8, 5.0)]  # fmt: skip


def test_names_that_nobody_has_are_refused():
    config = tiny_config("text.txt")
    config.sinks = ("table", "tensorbord")
    with pytest.raises(UserError, match=r"config.sinks = 'tensorbord': choose one of jsonl, tensorboard, .*, table"):
        tasks.validate(config)
    with pytest.raises(UserError, match=r"optimizer 'adam' is one of bertjax's own; register yours under another name"):
        optimizers.register("adam", own_parts.momentum)
