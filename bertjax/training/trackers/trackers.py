"""The interface and the registry of trackers, which receive the metrics of a run.

Every run writes `metrics.jsonl`. `config.sinks` names more trackers. The config field and the entry point group,
`bertjax.sinks`, keep an older name of trackers.
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
    """Receives the metrics of a run, on the first host only. A tracker receives each metric of a step once.

    A factory makes a tracker: (workdir, start_step, config) -> tracker. The run resumes after `start_step`, which is 0
    for a new run. Metrics of later steps that an earlier process wrote are invalid; the run computes these steps again.
    A factory that needs an optional package has its name as the attribute `package`.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives metrics of a step by name, such as "train/loss". Values may be NaN."""

    def flush(self) -> None:
        """Stores all metrics. The training loop calls this method when it saves a checkpoint."""

    def close(self) -> None:
        """Stores all metrics. The training loop calls this method at the end of the process."""


Factory = Callable[[epath.Path, int, ConfigDict], Tracker]

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
    """Returns the names in `config.sinks` without `DEFAULT`. An item may be several names with commas between them."""
    names = (name.strip() for item in config.sinks for name in split_at_commas(item))
    return tuple(dict.fromkeys(name for name in names if name not in ("", DEFAULT)))


def validate(config: ConfigDict) -> None:
    """Raises `UserError` if `config.sinks` names an unknown tracker, or a tracker whose package is not installed."""
    for name in tracker_names(config):
        package = getattr(TRACKERS.get(name), "package", "")
        spec = importlib.util.find_spec(package) if package else None
        if package and (spec is None or spec.origin is None):  # without an origin, it is a folder of the same name
            raise UserError(f"config.sinks = {name!r}: needs {package}: pip install 'bertjax[{name}]'")
