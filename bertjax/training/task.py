"""The interface between the training loop and a task, pre-training or fine-tuning."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from bertjax.data.batch import Batch
from bertjax.training.evaluator import Evaluator


class Recurrence(NamedTuple):
    """The recurrent memory of the rows of a batch, which continue the rows of the step before.

    Attributes:
      new_memory: () -> the memory of rows that have read nothing, a tree of arrays `[rows, ...]`.
      reach: the number of steps after which the memory does not depend on earlier steps.
    """

    new_memory: Callable[[], Any]
    reach: int


class Loss(Protocol):
    """The loss of a training step. Losses that compare equal share compiled programs, so that a loss is hashable.

    Attributes:
      couples_rows: whether the loss of a row depends on other rows of the batch, as in a contrastive loss. Then the
        loss is `loss_of_outputs` of `outputs`. These call `jax.lax.all_gather(..., mesh.GROUPS)` for the rows of
        other groups of devices.
    """

    @property
    def couples_rows(self) -> bool:
        """Whether rows depend on each other."""

    def normalize(self, batch: dict) -> dict:
        """Returns the global batch with weights such that the losses of its microbatches sum to its loss."""

    def cast(self, params: dict) -> dict:
        """Casts params to the types that the loss and evaluation compute with, before the params are gathered."""

    def __call__(self, params: dict, batch: dict, dropout_keys: jax.Array | None) -> tuple[jax.Array, dict]:
        """Returns the loss and the metrics, all sums over rows. Two metrics are `tokens` and `padding`.

        With recurrence the batch has the `memory` of its rows, and the metrics have the `memory` after it.

        Args:
          params: cast params.
          batch: a normalized batch, or a microbatch of it, `[rows, ...]`.
          dropout_keys: `[rows]` random keys; None for no dropout.
        """

    def outputs(self, params: dict, batch: dict, dropout_keys: jax.Array | None) -> jax.Array:
        """Returns the outputs of the model that `loss_of_outputs` reads, `[rows, ...]`.

        The outputs of a row do not depend on other rows. Only losses that couple rows have this method.
        """

    def loss_of_outputs(self, outputs: jax.Array, batch: dict) -> tuple[jax.Array, dict]:
        """Returns the loss and the metrics of the outputs of all rows of a batch.

        Only losses that couple rows have this method.
        """


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
    def recurrence(self) -> Recurrence | None:
        """The recurrent memory of the rows; None if each step reads rows by themselves."""

    def init_params(self, key: jax.Array) -> dict:
        """Returns random params, logically partitioned."""

    def is_frozen(self, path: tuple[str, ...]) -> bool:
        """Returns whether the task does not train the param at this path."""

    def layer_ids(self, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layers of the param at this path, see `models.family.ModelFamily.layer_ids`."""

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yields this host's rows of the batches of steps `start_step`, `start_step + 1`, ..."""

    def at(self, step: int) -> tuple[Loss, ConfigDict]:
        """Returns the loss and the config of the update after `step` updates. Stages of pre-training change both."""

    def mask_updates(self, updates: dict, step: jax.Array) -> dict:
        """Returns the updates of the optimizer that are applied after `step` updates, such as updates of new pieces."""

    def flops(self, start: int, stop: int) -> int:
        """Returns the model FLOPs of steps `start` to `stop - 1`."""
