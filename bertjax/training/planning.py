"""The interface of the planner to a kind of run, whose steps it compiles without data."""

import abc
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.config.stages import Stage
from bertjax.training.task import Task


class PlannedStage(NamedTuple):
    """The programs of a stage.

    Attributes:
      stage: the stage. Fine-tuning has one stage without steps, because their number depends on the data.
      rows: rows of a batch of training.
      batch: the shapes, types and shardings of a batch of training.
      evaluate: the compiled function of evaluation. Its arguments are cast params and `arguments`.
      arguments: the shapes, types and shardings of the other arguments of `evaluate`.
    """

    stage: Stage
    rows: int
    batch: dict
    evaluate: jax.stages.Wrapped
    arguments: tuple


class Planned(NamedTuple):
    """A task without data, and the programs of its stages."""

    task: Task
    stages: Sequence[PlannedStage]


class Planning(abc.ABC):
    """The part of a kind of run that the planner calls."""

    @abc.abstractmethod
    def adopt(self, config: ConfigDict) -> None:
        """Sets the fields of a config that `init_checkpoint` determines and that plans depend on."""

    @abc.abstractmethod
    def candidates(self, config: ConfigDict, platform: str, device_kind: str) -> Iterable[ConfigDict]:
        """Returns configs with values in place of "auto", the fastest first."""

    @abc.abstractmethod
    def open(self, config: ConfigDict, mesh: Mesh, real_tokens_share: Sequence[float]) -> Planned:
        """Returns the programs to compile.

        Args:
          config: the whole config.
          mesh: the devices, which need not exist.
          real_tokens_share: the share of real tokens in the sequences of each stage; empty without packing.

        Raises:
          UserError: if the programs depend on the data of the task.
        """
