"""Sinks: where the metrics of a run go, besides the terminal. `metrics.jsonl` always, others that `config.sinks`
names."""

from collections.abc import Callable, Mapping
from typing import Protocol

from etils import epath

from bertjax.registry import Registry


class Sink(Protocol):
    """Receives numbers, on the first host only. It need not remember any: nothing comes twice.

    A factory makes it: (workdir, start_step, config) -> sink. The run goes on after `start_step`, 0 for a new one; what
    an earlier process wrote of later steps is void, and will come again.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes numbers by name, such as "train/loss". They may be NaN."""

    def flush(self) -> None:
        """Stores what was written. A checkpoint is being saved, with which a resumed run may begin."""

    def close(self) -> None:
        """Stores what was written. The process ends."""


Factory = Callable[[epath.Path, int, object], Sink]

SINKS: Registry[Factory] = Registry("sink", "sinks", {"tensorboard": "bertjax.training.sinks.tensorboard:TensorBoard"})
register = SINKS.register
