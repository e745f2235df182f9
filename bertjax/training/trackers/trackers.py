"""Trackers: where the metrics of a run go, besides the terminal.

Every run writes `metrics.jsonl`. `config.sinks` names more trackers. The config field and the group of entry points,
`bertjax.sinks`, keep the older name.
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Protocol

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry
from bertjax.config.lists import split_at_commas


class Tracker(Protocol):
    """Receives numbers, on the first host only. It need not remember any: nothing comes twice.

    A factory makes it: (workdir, start_step, config) -> tracker. The run goes on after `start_step`, 0 for a new one.
    Numbers of later steps that an earlier process wrote are void, and will come again. A factory that needs a package
    which bertjax can do without names it as its `package`.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes numbers by name, such as "train/loss". They may be NaN."""

    def flush(self) -> None:
        """Stores what was written. A checkpoint is being saved, with which a resumed run may begin."""

    def close(self) -> None:
        """Stores what was written. The process ends."""


Factory = Callable[[epath.Path, int, object], Tracker]

ALWAYS = "jsonl"  # the one that every run has, whether it is named or not
TRACKERS: Registry[Factory] = Registry(
    "sink",
    "sinks",
    {
        "tensorboard": "bertjax.training.trackers.tensorboard:TensorBoard",
        "mlflow": "bertjax.training.trackers.mlflow:MLflow",
        "wandb": "bertjax.training.trackers.wandb:WandB",
    },
    reserved=(ALWAYS,),
)
register = TRACKERS.register


def named(config) -> tuple[str, ...]:
    """Returns the names in `config.sinks`, each of which may be several with commas between, without `ALWAYS`."""
    names = (name.strip() for each in config.sinks for name in split_at_commas(each))
    return tuple(dict.fromkeys(name for name in names if name not in ("", ALWAYS)))


def validate(config) -> None:
    """Raises `UserError` if `config.sinks` names no tracker, or one whose package is not installed."""
    for name in named(config):
        package = getattr(TRACKERS.get(name), "package", "")
        found = importlib.util.find_spec(package) if package else None
        if package and (found is None or found.origin is None):  # a folder of this name is no package
            raise UserError(f"config.sinks = {name!r}: needs {package}: pip install 'bertjax[{name}]'")
