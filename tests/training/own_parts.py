"""A user-defined optimizer, schedule, sink and hook."""

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from bertjax.training import hooks
from bertjax.training.hooks.registry import HOOKS
from bertjax.training.optim import groups, optimizers, schedules
from bertjax.training.trackers import trackers


def momentum(config, axes):
    """Gradients with momentum, and with the weight decay and the groups of the config."""
    return [optax.trace(config.beta1), groups.add_weight_decay(config), groups.scale_by_learning_rate(config)]


class Sawtooth(NamedTuple):
    """Falls from the peak to 0 repeatedly."""

    peak: float
    period: int

    def __call__(self, step: int | jax.Array) -> jax.Array:
        return self.peak * (1 - jnp.asarray(step % self.period, jnp.float32) / self.period)


def sawtooth(config, warmup_steps: int, total_steps: int) -> Sawtooth:
    return Sawtooth(config.learning_rate, period=4)


class Table:
    """A text file with a line per number.

    A resumed run writes its start step: earlier lines after this step are void.
    """

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


class Journal(hooks.Hook):
    """Writes a line to a text file for each call."""

    def on_start(self, run):
        self._path = run.workdir / "journal.txt"
        self._write("on_start", run.step)

    def before_step(self, run):
        self._write("before_step", run.step)

    def on_batch(self, run, batch):
        self._write("on_batch", run.step, len(next(iter(batch.values()))))

    def on_step(self, run, metrics):
        self._write("on_step", run.step, int(run.state.step))

    def on_metrics(self, run, metrics):
        self._write("on_metrics", run.step, *metrics)

    def on_save(self, run):
        self._write("on_save", run.step)

    def on_evaluation(self, run, scores):
        self._write("on_evaluation", run.step, *scores.scores)

    def on_end(self, run, error):
        self._write("on_end", run.step, type(error).__name__)

    def _write(self, *words):
        with self._path.open("a") as file:
            print(*words, file=file)


@contextlib.contextmanager
def registered():
    """Registers the four parts until the end of the block."""
    optimizers.register("momentum", momentum)
    schedules.register("sawtooth", sawtooth)
    trackers.register("table", Table)
    hooks.register("journal", Journal)
    yield
    del optimizers.OPTIMIZERS.registered["momentum"]
    del schedules.SCHEDULES.registered["sawtooth"]
    del trackers.TRACKERS.registered["table"]
    del HOOKS.registered["journal"]


def used_in(config):
    """Sets the names of the parts in a config."""
    config.optimizer.update(name="momentum", schedule="sawtooth", learning_rate=0.01)
    config.sinks, config.hooks = ("table", "tensorboard"), ("journal",)
    return config
