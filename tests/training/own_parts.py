"""An optimizer, a schedule and a sink, as somebody outside the package would write them."""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bertjax.training.optim import groups, optimizers, schedules
from bertjax.training.trackers import trackers


def momentum(config, axes):
    """Gradients with momentum, and with the weight decay and the groups of the config."""
    return [optax.trace(config.beta1), groups.add_weight_decay(config), groups.scale_by_learning_rate(config)]


class Sawtooth(NamedTuple):
    """Falls from the peak to 0 again and again."""

    peak: float
    period: int

    def __call__(self, step: int | jax.Array) -> jax.Array:
        return self.peak * (1 - jnp.asarray(step % self.period, jnp.float32) / self.period)


def sawtooth(config, warmup_steps: int, total_steps: int) -> Sawtooth:
    return Sawtooth(config.learning_rate, period=4)


class Table:
    """A text file with a line for each number. A resumed run says from where on the lines above are void."""

    def __init__(self, workdir, start_step, config):
        self._path = workdir / "table.txt"
        self._lines = [f"after {start_step}"]

    def write(self, step, metrics):
        self._lines += [f"{step} {name} {value}" for name, value in metrics.items()]

    def flush(self):
        before = self._path.read_text() if self._path.exists() else ""
        self._path.write_text(before + "".join(f"{line}\n" for line in self._lines))
        self._lines = []

    def close(self):
        self._lines.append("closed")
        self.flush()


@contextlib.contextmanager
def registered():
    """Registers the three, until the end of the block."""
    optimizers.register("momentum", momentum)
    schedules.register("sawtooth", sawtooth)
    trackers.register("table", Table)
    yield
    del optimizers.OPTIMIZERS.registered["momentum"]
    del schedules.SCHEDULES.registered["sawtooth"]
    del trackers.TRACKERS.registered["table"]


def used_in(config):
    """Names them in a config."""
    config.optimizer.update(name="momentum", schedule="sawtooth", learning_rate=0.01)
    config.sinks = ("table", "tensorboard")
    return config
