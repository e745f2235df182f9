"""The interface by which the planner (`bertjax.planner`) compiles the steps of a run without data."""

import abc
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.config.resolved import Resolution
from bertjax.config.stages import Stage
from bertjax.training.task import Task


class PlannedStage(NamedTuple):
    """A stage, and the abstract inputs of its training step and evaluation function.

    Attributes:
      stage: the stage. Fine-tuning has one stage with 0 steps, because the number of steps depends on the data.
      rows: the number of rows of a training batch.
      batch: the shapes, dtypes and shardings of a training batch.
      evaluate: the jitted evaluation function: (cast params, *arguments) -> results.
      arguments: the shapes, dtypes and shardings of `*arguments`.
    """

    stage: Stage
    rows: int
    batch: dict
    evaluate: jax.stages.Wrapped
    arguments: tuple


class Planned(NamedTuple):
    """A task without data, and the stages of the task."""

    task: Task
    stages: Sequence[PlannedStage]


class Planning(abc.ABC):
    """The methods of a kind of run that the planner calls."""

    @abc.abstractmethod
    def resolve(self, config: ConfigDict) -> Resolution:
        """Sets the fields that affect memory and time and that `init_checkpoint` determines. Returns the new config."""

    @abc.abstractmethod
    def candidates(self, config: ConfigDict, platform: str, device_kind: str) -> Iterable[ConfigDict]:
        """Returns configs with values in place of "auto", from the fastest to the slowest."""

    @abc.abstractmethod
    def open(self, config: ConfigDict, mesh: Mesh, real_tokens_share: Sequence[float]) -> Planned:
        """Returns the task and the stages to compile.

        Args:
          config: the whole config.
          mesh: the mesh; the devices may be abstract devices that this machine does not have.
          real_tokens_share: for each stage, the fraction of non-padding tokens in padded sequences; empty without
            packing.

        Raises:
          UserError: if the shapes of the batches depend on the data.
        """
