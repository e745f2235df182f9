"""A user-defined family, objective, optimizer, schedule, sink and hook in the same runs."""

import jax
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, stage
from bertjax.interop import pretrained
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.objectives.registry import OBJECTIVES, register
from bertjax.pretraining.task import Pretraining
from bertjax.reporting import curves, insight
from bertjax.reporting.history import read_history
from bertjax.training.checkpoints import checkpoint
from bertjax.training.loop import train_task
from bertjax.training.optim import optimizers
from bertjax.training.trackers import trackers
from bertjax.training.trackers.jsonl import read_metrics
from tests.checkpoints import on_one_device  # noqa: F401
from tests.conftest import launch_and_stop, tiny_config
from tests.models import own_family
from tests.objectives import own_objective
from tests.training import own_parts
from tests.training.test_loop import leaves, stopped_run
from tests.training.toy import Toy, toy_config

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module", autouse=True)
def registered():
    families.register("mixer", own_family.FAMILY)
    register("count", own_objective.OBJECTIVE)
    with own_parts.registered():
        yield
    del families.FAMILIES.registered["mixer"]
    del OBJECTIVES.registered["count"]


def config_for(records, objective="count + mlm"):
    config = own_parts.used_in(tiny_config(records=records))
    fields = {name: value for name, value in config.model.items() if name != "family"}
    config.model = families.model_fields("mixer", **fields | dict(hidden_size=16, mixing_act="relu"))
    config.objective, config.stages = objective, named_stages(only=stage(10, 32, 5))
    validate(config)
    return config


@pytest.mark.slow
def test_a_run_with_user_parts_is_resumed_bit_for_bit_evaluated_and_reported(records_folder, tmp_path):
    """The resumed run writes the same objective in another notation."""
    launch(config_for(records_folder), tmp_path / "straight")
    launch_and_stop(Pretraining, config_for(records_folder), tmp_path / "run", step=7)
    launch(config_for(records_folder, "1*count+mlm"), tmp_path / "run")
    source, straight = (pretrained.read_with_tokenizer(tmp_path / name) for name in ("run", "straight"))
    jax.tree.map(np.testing.assert_array_equal, source.params, straight.params)
    assert source.predicts_words and source.config.mixing_act == "relu" and "counter" in source.params
    for objective in ("mlm + count", "mlm"):  # the sum in another order has another best checkpoint
        with pytest.raises(UserError, match=r"config.objective = .*'count \+ mlm'"):
            launch(config_for(records_folder, objective), tmp_path / "run")
    with pytest.raises(UserError, match=r"a model with model.family = 'mixer' has no attention"):
        insight.attention(source, "the ship")

    lines = read_metrics(tmp_path / "run")
    last = [line for line in lines if "eval/count_loss" in line][-1]
    assert {"eval/count_loss", "eval/count_noise", "eval/count_mean_loss", "eval/mlm_loss"} <= last.keys()
    assert 0 < abs(last["eval/count_noise"]) < 0.5  # the mean of many random numbers: evaluation has keys, too
    assert all("train/mlm_accuracy" in line for line in lines if "train/loss" in line)
    assert "held-out counts: " in (tmp_path / "run/report.txt").read_text()
    figure = curves.draw_curves([read_history(tmp_path / "run")])
    assert "loss of counts" in [axis.get_title() for axis in figure.axes]


# With a task that compiles in a moment.


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """The folder with an uninterrupted run and with a run that was stopped at step 7 and resumed; both final states."""
    folder, config = tmp_path_factory.mktemp("toys"), own_parts.used_in(toy_config())
    straight = train_task(task := Toy(config), config, folder / "straight", task.mesh)
    stopped_run(lambda task: train_task(task, config, folder / "run", task.mesh), Toy(config), 7)
    assert checkpoint.steps(folder / "run")[-1] == 7
    resumed = train_task(task := Toy(config), config, folder / "run", task.mesh)
    return folder, leaves(straight.state), leaves(resumed.state)


def test_the_optimizer_equals_its_formula(toys):
    _, straight, resumed = toys
    assert straight.keys() == resumed.keys() and any("trace" in name for name in resumed)
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)

    params = {"kernel": np.zeros((3, 1)), "bias": np.zeros(1)}
    trace = {"kernel": np.zeros((3, 1)), "bias": np.zeros(1)}
    for step, batch in enumerate(Toy(toy_config()).batches(0)):
        x, y = batch["x"].astype(float), batch["y"].astype(float)
        error = 2 * ((x @ params["kernel"])[:, 0] + params["bias"] - y) / len(y)
        gradient = {"kernel": x.T @ error[:, None], "bias": error.sum(keepdims=True)}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        for name, decay in (("kernel", 0.01), ("bias", 0.0)):
            trace[name] = gradient[name] / max(norm, 1) + 0.9 * trace[name]
            params[name] = params[name] - 0.01 * (1 - step % 4 / 4) * (trace[name] + decay * params[name])
    for name, value in params.items():
        np.testing.assert_allclose(straight[f".params['dense']['{name}']"], value, rtol=1e-5)


def test_a_sink_gets_every_number_once_and_the_start_step_of_a_resume(toys):
    folder = toys[0] / "run"
    first, second = (folder / "table.txt").read_text().split("after 7\n")
    assert first.startswith("after 0\n") and first.endswith("closed\n") and second.endswith("closed\n")
    lines = [line.split() for line in (first + second).splitlines() if line[0].isdigit()]
    written = [(int(step), name) for step, name, _ in lines]
    assert written == [(line["step"], name) for line in read_metrics(folder) for name in line if name != "step"]
    assert [step for step, name in written if name == "train/loss"] == [2, 4, 5, 6, 8, 10]


def test_hooks_are_called_in_the_documented_order_across_a_resume(toys):
    lines = (toys[0] / "run/journal.txt").read_text().splitlines()
    end, resumed = lines.index("on_end 7 KeyboardInterrupt"), lines[lines.index("on_start 7") :]
    assert lines[:5] == ["on_start 0", "before_step 1", "on_batch 1 16", "on_step 1 1", "before_step 2"]
    fifth = ["before_step 5", "on_batch 5 16", "on_step 5 5", "on_metrics 5 5", "on_save 5", "on_evaluation 5 score"]
    assert lines[lines.index(fifth[0]) : lines.index("before_step 6")] == fifth
    assert lines[end - 2 : end + 2] == ["on_metrics 7 7", "on_save 7", "on_end 7 KeyboardInterrupt", "on_start 7"]
    rest = ["on_start 7", "on_metrics 8 8", "on_metrics 10 9 10", "on_save 10", "on_evaluation 10 score"]
    assert [x for x in resumed if "step" not in x and "batch" not in x] == [*rest, "on_end 10 NoneType"]


@pytest.mark.slow
def test_tensorboard_discards_steps_that_a_resumed_run_repeats(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, values in ((0, {2: 1.0, 4: 2.0, 6: 3.0}), (4, {6: 4.0, 8: 5.0})):
        sink = trackers.TRACKERS.get("tensorboard")(tmp_path, start, toy_config())
        for step, value in values.items():
            sink.write(step, {"train/loss": value})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(2, 1.0), (4, 2.0), (6, 4.0), (8, 5.0)]


def test_names_of_the_package_cannot_be_registered():
    with pytest.raises(
        UserError, match=r"optimizer 'adam' is a name of bertjax; register the object under another name"
    ):
        optimizers.register("adam", own_parts.momentum)
