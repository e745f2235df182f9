"""What the planner asks of a kind of run, pre-training or fine-tuning, whose steps it compiles without data."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from bertjax.config.stages import Stage
from bertjax.training.task import Task


class PlannedStage(NamedTuple):
    """What is compiled of a stage.

    Attributes:
      stage: fine-tuning has one, of no steps: their number depends on the data.
      rows: rows of a batch of training; `batch`: its shapes, types and shardings.
      evaluate: compiled function of cast params and more: `arguments`, their shapes, types and shardings.
    """

    stage: Stage
    rows: int
    batch: dict
    evaluate: Callable
    arguments: tuple


class Planned(NamedTuple):
    task: Task
    stages: Sequence[PlannedStage]


@dataclasses.dataclass(frozen=True)
class Planning:
    """The functions of a kind of run for the planner.

    Args:
      adopt: (config) sets the fields that `init_checkpoint` determines, as far as plans depend on them.
      ways: (config, platform, device_kind) -> the config with what "auto" may stand for, the fastest first.
      open: (config, mesh, share of real tokens by stage, none without packing) -> what is compiled. Raises `UserError`
        for a task that is only known with its data.
    """

    adopt: Callable[[object], None]
    ways: Callable[[object, str, str], Iterator]
    open: Callable[[object, Mesh, Sequence[float]], Planned]
