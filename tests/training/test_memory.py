"""A step that does not fit ends in one line, with a setting to try."""

import jax
import pytest

from bertjax.config import UserError
from bertjax.sharding.mesh import make_mesh
from bertjax.training import run as run_module
from bertjax.training.run import Kind, Run, run
from bertjax.training.workdir import RunInfo
from tests.conftest import tiny_config

EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes."


def run_out(config, message, monkeypatch, tmp_path):
    """A run whose training ends with an error of JAX."""

    def train(*_, **__):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(run_module, "train", train)
    opened = Run(config, make_mesh(config), None, RunInfo(config), None, None, [], lambda trained: "")
    kind = Kind(lambda _: (), lambda *_: None, lambda *_: None, lambda *_: opened, lambda *_: [], None)
    run(kind, config, tmp_path)


@pytest.mark.parametrize(
    "fields, remedy",
    [
        ({}, "try --config.remat=dots"),
        ({"remat": "full"}, "try --config.remat=full --config.microbatches=2"),  # 8 rows for 8 devices
        ({"remat": "auto"}, "try --config.remat=full --config.microbatches=2"),  # which has tried them all
        ({"unroll": "yes"}, "try --config.unroll=no"),
        ({"remat": "full", "microbatches": 2}, "choose a smaller batch_size, or more devices"),
    ],
)
def test_it_is_named_in_one_line(fields, remedy, monkeypatch, tmp_path):
    config = tiny_config("unused")
    config.update(fields)
    with pytest.raises(UserError) as raised:
        run_out(config, EXHAUSTED, monkeypatch, tmp_path)
    assert str(raised.value).startswith(f"a step of 16 rows runs out of memory (cpu): {remedy}")


def test_other_errors_are_left_alone(monkeypatch, tmp_path):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        run_out(tiny_config("unused"), "INTERNAL: something else", monkeypatch, tmp_path)
