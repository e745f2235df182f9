"""The interface between the training loop and a task, pre-training or fine-tuning."""

import abc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from bertjax.data.batch import Batch
from bertjax.training.evaluator import Evaluator


class Carry(NamedTuple):
    """Arrays of the rows of a batch that a step passes to the next step, such as the recurrent memory of a model.

    Attributes:
      new: () -> the carry of the first step, a NamedTuple of arrays `[rows, ...]`. Its method `where(continues)`
        empties the carry of rows that do not continue.
      reach: the number of steps after which a carry does not depend on earlier steps.
    """

    new: Callable[[], Any]
    reach: int


class Loss(abc.ABC):
    """The loss of a training step. A loss is hashable, and equal losses share compiled programs."""

    @abc.abstractmethod
    def __call__(self, params: dict, batch: dict, dropout_keys: jax.Array | None = None) -> tuple[jax.Array, dict]:
        """Returns the loss and the metrics, all sums over rows. Two metrics are `tokens` and `padding`.

        With a carry the batch has the `carry` of its rows, and the metrics have the `carry` for the next step.

        Args:
          params: cast params.
          batch: a normalized batch, or a microbatch of it, `[rows, ...]`.
          dropout_keys: `[rows]` random keys; None for no dropout.
        """

    @abc.abstractmethod
    def normalize(self, batch: dict) -> dict:
        """Returns the global batch with weights such that the losses of its microbatches sum to its loss."""

    @abc.abstractmethod
    def cast(self, params: dict) -> dict:
        """Casts params to the types that the loss and evaluation compute with, before the params are gathered."""


class CoupledLoss(Loss):
    """A loss whose rows may depend on other rows of the batch, as in a contrastive loss.

    The loss is `loss_of_outputs` of `outputs`. `loss_of_outputs` calls `jax.lax.all_gather(..., mesh.GROUPS)` for the
    rows of other groups of devices.

    Attributes:
      couples_rows: whether rows depend on each other. False: microbatches are computed independently.
    """

    couples_rows: bool

    @abc.abstractmethod
    def outputs(self, params: dict, batch: dict, dropout_keys: jax.Array | None = None) -> jax.Array:
        """Returns the outputs of the model `[rows, ...]`. The outputs of a row do not depend on other rows."""

    @abc.abstractmethod
    def loss_of_outputs(self, outputs: jax.Array, batch: dict) -> tuple[jax.Array, dict]:
        """Returns the loss and the metrics of the outputs of all rows of a batch."""


class Task(Protocol):
    """Pre-training, or a fine-tuning task.

    Attributes:
      total_steps: the number of updates of a run.
    """

    total_steps: int

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator of the run."""

    @property
    def carry(self) -> Carry | None:
        """The carry of the rows; None if steps do not depend on each other."""

    def init_params(self, key: jax.Array) -> dict:
        """Returns random params, logically partitioned."""

    def is_frozen(self, path: tuple[str, ...]) -> bool:
        """Returns whether the task does not train the param at this path."""

    def layer_ids(self, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layers of the param at this path, see `models.family.ModelFamily.layer_ids`."""

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yields this host's rows of the batches of steps `start_step`, `start_step + 1`, ..."""

    def loss_and_config(self, step: int) -> "tuple[Loss, ConfigDict]":
        """Returns the loss and the config of the update after `step` updates. Stages of pre-training change both."""

    def mask_updates(self, updates: dict, step: jax.Array) -> dict:
        """Returns the updates of the optimizer that are applied after `step` updates, such as updates of new pieces."""

    def flops(self, start: int, stop: int) -> int:
        """Returns the model FLOPs of steps `start` to `stop - 1`."""
