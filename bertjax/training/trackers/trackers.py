"""The interface and the registry of trackers, which receive the metrics of a run.

Every run writes `metrics.jsonl`. `config.sinks` lists the names of further trackers. "Sink" is an older name for a
tracker, which the config field and the entry point group `bertjax.sinks` keep.
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Protocol

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry
from bertjax.config.lists import split_at_commas


class Tracker(Protocol):
    """Receives the metrics of a run, on the first host only. A process passes each metric of each step once.

    Register a factory, such as the class of the tracker: (workdir, start_step, config) -> tracker. `workdir` is the
    folder of the run, an `epath.Path`, and `config` the config of the run. The run resumes from the checkpoint of
    `start_step`, which is 0 for a new run. The run repeats later steps of an earlier process: the tracker must discard
    the metrics of these steps, or must not record them a second time. If the tracker needs an optional package, the
    attribute `package` of the factory is the name of this package.

    Examples:
      >>> class Printer:
      ...     def __init__(self, workdir, start_step, config):
      ...         self.name = workdir.name
      ...
      ...     def write(self, step, metrics):
      ...         print(self.name, step, metrics.get("train/loss"))
      ...
      ...     def flush(self):
      ...         pass
      ...
      ...     close = flush
      >>> bertjax.training.trackers.register("printer", Printer)
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics of a step. Several calls can have the same step, with different metrics.

        Args:
          step: the number of updates, 1 after the first step.
          metrics: {name: value}, such as "train/loss" and "eval/accuracy". A value can be NaN or infinite.
        """

    def flush(self) -> None:
        """Writes all buffered metrics. The training loop calls this method when it saves a checkpoint.

        A run that resumes from the checkpoint does not write these metrics again.
        """

    def close(self) -> None:
        """Writes all buffered metrics and closes the tracker. The training loop calls this method at the end."""


Factory = Callable[[epath.Path, int, ConfigDict], Tracker]  # (workdir, start_step, config) -> tracker

DEFAULT = "jsonl"  # the tracker that every run has; `config.sinks` may name it
TRACKERS: Registry[Factory] = Registry(
    "sink",
    "sinks",
    {
        "tensorboard": "bertjax.training.trackers.tensorboard:TensorBoard",
        "mlflow": "bertjax.training.trackers.mlflow:MLflow",
        "wandb": "bertjax.training.trackers.wandb:WandB",
    },
    reserved=(DEFAULT,),
)
register = TRACKERS.register


def tracker_names(config: ConfigDict) -> tuple[str, ...]:
    """Returns the names in `config.sinks` without `DEFAULT`. An item may contain several names, separated by commas."""
    names = (name.strip() for item in config.sinks for name in split_at_commas(item))
    return tuple(dict.fromkeys(name for name in names if name not in ("", DEFAULT)))


def validate(config: ConfigDict) -> None:
    """Raises `UserError` if `config.sinks` names an unknown tracker, or a tracker whose package is not installed."""
    for name in tracker_names(config):
        package = getattr(TRACKERS.get(name), "package", "")
        spec = importlib.util.find_spec(package) if package else None
        if package and (spec is None or spec.origin is None):  # a folder of the same name has no origin
            raise UserError(f"config.sinks = {name!r}: needs the package {package}; run pip install 'bertjax[{name}]'")
