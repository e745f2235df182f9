"""Fine-tuning that trains some of the params, or stops early."""

import shutil

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from bertjax.config import UserError, param_group, param_groups
from bertjax.interop import pretrained
from bertjax.tasks import validate
from bertjax.tasks.finetuning import FineTuning
from bertjax.tasks.pretraining import Pretraining
from bertjax.training import checkpoint as checkpoints
from tests.conftest import launch_and_stop, one_device_mesh, tiny_config
from tests.tasks.test_finetuning import config_for, run, write_sst2

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    write_sst2(folder)
    return folder


def params_of(workdir, step):
    return flatten_dict(checkpoints.read_params(workdir, step), sep="/")


def test_frozen_layers_stay_and_resume_as_if_never_stopped(folder, checkpoint, capsys):
    def config(freeze_layers=1, still="pooler/dense/bias"):
        config = config_for(folder, checkpoint, epochs=1.0, freeze_layers=freeze_layers)
        config.optimizer.layer_decay, config.checkpoint.every_steps = 0.9, 5
        config.optimizer.groups = param_groups(still=param_group(still, learning_rate_factor=0.0))
        return config

    run(config(), folder / "straight")
    said = capsys.readouterr().out
    launch_and_stop(FineTuning, config(), folder / "stopped", step=9)
    for changed, field in (
        (config(0), "config.freeze_layers = 0"),
        (config(1, "masked"), "groups.still.params = 'masked'"),
    ):
        with pytest.raises(UserError, match=f"{field}: .* holds a run with"):
            run(changed, folder / "stopped")
    run(config(), folder / "stopped")
    straight, resumed = (params_of(folder / name, 19) for name in ("straight", "stopped"))
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight | resumed)

    before, stays = flatten_dict(pretrained.read(checkpoint).params, sep="/"), {}
    for name in straight.keys() & before.keys():
        change = np.abs(straight[name] - before[name])
        stays[name] = (change == 0).reshape(len(change), -1).all(1).tolist()
    stacked = {name for name in stays if "layers" in name and not name.endswith("query_key_value/bias")}
    assert all(stays[name] == [True, False] for name in stacked) and len(stacked) == 11
    still = {name for name, rows in stays.items() if all(rows)}
    assert still == {name for name in before if "embeddings" in name} | {"bert/pooler/dense/bias"}

    trained = sum(x.size // (2 if "layers" in name else 1) for name, x in straight.items() if name not in still)
    every = sum(x.size for x in straight.values())
    sizes = [2 * 4 * count + 4 for count in (trained, every)]  # two moments, and Adam's count of steps
    assert (
        f"trains {trained:,} of {every:,} params; the optimizer's state has {sizes[0]:,} bytes, of all it had "
        f"{sizes[1]:,}" in said
    )


def test_a_run_and_a_search_stop_early_and_know_that_they_have(folder, checkpoint, capsys):
    """With a learning rate that changes nothing, the second epoch is no better."""

    def config(**fields):
        config = config_for(folder, checkpoint, **fields)
        config.eval.patience, config.optimizer.learning_rate = 1, 1e-9
        return config

    run(config(), folder / "early")
    report = (folder / "early/report.txt").read_text()
    assert report.endswith("\nstopped early, at step 38 of 76: 1 evaluations without a better score\n")
    run(config(), folder / "early")
    assert f"already finished: 38 of 76 steps, in {folder / 'early'}\n{report}" in capsys.readouterr().out
    assert pretrained.read(folder / "early").step == 38

    run(config(sweep="seed=0,1", epochs=3.0), folder / "search")
    for trial in ("seed=0", "seed=1"):
        assert "stopped early, at step 38 of 57" in (folder / f"search/runs/{trial}/report.txt").read_text()
    run(config(sweep="seed=0,1,2", epochs=3.0), folder / "search")
    assert capsys.readouterr().out.count("stopped early") == 3


def test_without_held_out_text_there_is_no_patience(records_folder, tmp_path):
    config = tiny_config("text.txt")
    config.eval.patience, config.data.heldout_fraction = 3, 0.0
    with pytest.raises(
        UserError, match=r"data.heldout_fraction = 0.0: no text is held out, by whose score a run could"
    ):
        validate(config)
    shutil.copytree(records_folder, tmp_path / "records")
    (tmp_path / "records/manifest.json").unlink()  # without one, names tell what is held out
    for path in (tmp_path / "records").glob("*/heldout*"):
        path.unlink()
    config = tiny_config(records=tmp_path / "records")
    config.eval.patience = 3
    validate(config)
    with pytest.raises(UserError, match=r"config.eval.patience = 3: .* holds out no text, by whose score"):
        Pretraining(config, one_device_mesh(config), tmp_path / "records")
