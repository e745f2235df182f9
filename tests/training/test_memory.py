"""An out-of-memory error ends in one line, with a setting to try."""

import copy
import types

import jax
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.resolved import Resolution, ResolvedConfig
from bertjax.distributed.mesh import make_mesh
from bertjax.finetuning import run as finetuning_run
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.pretraining import run as pretraining_run
from bertjax.training import run as run_module
from bertjax.training.checkpoints.workdir import RunInfo
from bertjax.training.monitoring import memory
from bertjax.training.monitoring.memory import memory_limit, memory_saving_settings, raise_if_out_of_memory
from bertjax.training.run import Run, RunKind, run_training
from experiments import glue
from tests.conftest import tiny_config

EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes."


def running(config, chosen):
    """Returns a task with these compute settings."""
    computing = copy.deepcopy(config)
    computing.update(chosen)
    return types.SimpleNamespace(loss_and_config=lambda step: (None, computing))


def run_out(config, message, monkeypatch, tmp_path, chosen=types.MappingProxyType({})):
    """A run whose training raises an error of JAX, after the compute settings were chosen."""

    def train(*_, **__):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(run_module, "train_task", train)

    class OpenedRun(Run):
        initial_params = report = reopen = None

    class Opened(RunKind):
        planning = identity = total_steps = changes_of_data = None

        def resolve(self, config, info):
            return Resolution(ResolvedConfig.copy_of(config))

        def open(self, config, workdir, info):
            task = running(config, chosen)
            return OpenedRun(config, make_mesh(config), task, RunInfo(config), tokenizer=None, notes=[])

    run_training(Opened(), config, tmp_path)


@pytest.mark.parametrize("fields, chosen, remedy", [
    ({}, {}, "try --config.remat=dots"),
    ({"remat": "full"}, {}, "try --config.remat=full --config.microbatches=2"),  # 8 rows for 8 devices
    ({"remat": "auto"}, {"remat": "none", "unroll": "yes"}, "try --config.unroll=no"),
    ({"remat": "auto"}, {"remat": "none"}, "try --config.remat=dots"),
    ({"unroll": "yes"}, {}, "try --config.unroll=no"),
    ({"remat": "full", "microbatches": 2}, {}, "choose a smaller batch_size, or more devices"),
])  # fmt: skip
def test_out_of_memory_raises_one_line(fields, chosen, remedy, monkeypatch, tmp_path):
    config = tiny_config("unused")
    config.update(fields)
    with pytest.raises(UserError) as raised:
        run_out(config, EXHAUSTED, monkeypatch, tmp_path, chosen)
    assert str(raised.value).startswith(f"a step of 16 rows runs out of memory (cpu): {remedy}")


def test_a_host_reads_memory_of_local_devices_only():
    """Memory statistics of remote devices raise an error."""

    def raises():
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: MemoryStats is only supported for addressable devices")

    far = types.SimpleNamespace(memory_stats=raises, device_kind="TPU v4")
    near = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 3 << 30}, device_kind="TPU v4")
    mesh = types.SimpleNamespace(devices=np.array([far, near]), local_devices=[near], shape={"data": 2, "fsdp": 1})
    assert memory_limit(mesh) == 3 << 30
    with pytest.raises(UserError, match=r"runs out of memory \(TPU v4, 3\.0 GiB for JAX\): try"):
        config = tiny_config("unused")
        config.packing = True  # the number of rows depends on the data
        raise_if_out_of_memory(jax.errors.JaxRuntimeError(EXHAUSTED), config, running(config, {}), mesh, None)


@pytest.mark.slow
def test_the_suggested_setting_fits(monkeypatch, capsys):
    """For pre-training, whose steps do not depend on data."""
    config, tried = tiny_config("unused"), []

    def fits(lowered, limit):
        tried.append(lowered)
        return limit == 1 << 30 and len(tried) > 2  # dots does not fit in the second stage

    monkeypatch.setattr(memory, "memory_limit", lambda mesh: 1 << 30)
    monkeypatch.setattr(memory, "fits_in_memory", lambda lowered, limit: fits(lowered, limit) or len(tried) == 1)
    arguments = config, running(config, {"remat": "none"}), make_mesh(config), pretraining_run.KIND.planning
    with pytest.raises(UserError, match=r"1\.0 GiB for JAX\): it fits with --config\.remat=full$"):
        raise_if_out_of_memory(jax.errors.JaxRuntimeError(EXHAUSTED), *arguments)
    assert len(tried) == 4  # both stages, twice
    assert capsys.readouterr().out.count("compiling it with --config.remat=") == 2

    tried.clear()
    config = glue.get_config("mrpc")  # the shapes depend on the data
    arguments = config, running(config, {"remat": "none"}), make_mesh(config), finetuning_run.KIND.planning
    with pytest.raises(UserError, match=r": try --config\.remat=dots$"):
        raise_if_out_of_memory(jax.errors.JaxRuntimeError(EXHAUSTED), *arguments)
    assert not tried


def test_suggested_settings_are_valid():
    for unroll in ("auto", "yes", "no"):
        config = tiny_config("unused")
        config.unroll = unroll
        suggested = list(memory_saving_settings(config))
        assert {"remat": "full"}.items() <= suggested[-1].items()
        for settings in suggested:
            changed = copy.deepcopy(config)
            changed.update(settings)
            validate(changed)


def test_other_errors_are_raised_unchanged(monkeypatch, tmp_path):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        run_out(tiny_config("unused"), "INTERNAL: something else", monkeypatch, tmp_path)


@pytest.mark.parametrize("has, remedy", [
    (1, "choose a smaller model or batch_size"), (5_000_000, "set --config.remat=full, or choose a smaller batch_size"),
])  # fmt: skip
def test_a_too_large_run_is_refused_before_compilation(has, remedy, records_folder, tmp_path, monkeypatch):
    config = tiny_config(records=records_folder)
    config.model.num_hidden_layers, config.batch_size = 8, 512
    monkeypatch.setattr(memory, "host_memory", lambda: has * jax.local_device_count())
    with pytest.raises(UserError, match=rf"config.batch_size = 512: a step needs at least 0.0 GiB, .* {remedy}"):
        launch(config, tmp_path)
    monkeypatch.undo()
    assert memory.host_memory() > 1e8
