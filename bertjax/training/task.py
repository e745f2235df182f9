"""The interface of a training task, pre-training or fine-tuning, for the training loop."""

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
      init: () -> the carry of the first step, a NamedTuple of arrays `[rows, ...]`. The method `where(continues)` of
        the carry resets the rows whose text does not continue; `continues` is a boolean or `[rows]` booleans.
      reach: the number of previous steps on which the carry of a step depends.
    """

    init: Callable[[], Any]
    reach: int


class Loss(abc.ABC):
    """The loss of a training step. A loss must be hashable, because equal losses share compiled programs."""

    @abc.abstractmethod
    def __call__(self, params: dict, batch: dict, dropout_keys: jax.Array | None = None) -> tuple[jax.Array, dict]:
        """Returns the loss, a scalar, and {metric: scalar}. The loss and the metrics are sums over the rows.

        The metrics include `tokens` and `padding`, the numbers of tokens and of padding tokens. With a carry,
        `batch["carry"]` is the carry of the rows, and `metrics["carry"]` the carry for the next step.

        Args:
          params: the result of `cast`.
          batch: the result of `normalize`, or a microbatch of the result, `[rows, ...]`.
          dropout_keys: `[rows]` random keys; None for no dropout.
        """

    @abc.abstractmethod
    def normalize(self, batch: dict) -> dict:
        """Normalizes the weights of a global batch, so that the losses of the microbatches sum to the mean loss."""

    @abc.abstractmethod
    def cast(self, params: dict) -> dict:
        """Casts stored params to the dtypes of the loss and the evaluation. The params are gathered after the cast."""


class CoupledLoss(Loss):
    """A loss that may depend on several rows at once, such as a contrastive loss with in-batch negatives.

    The loss is `loss_of_outputs(outputs(...))`. `loss_of_outputs` calls `jax.lax.all_gather(..., mesh.GROUPS)` for the
    rows of other groups of devices.

    Attributes:
      couples_rows: whether the loss depends on several rows at once. If not, microbatches are independent.
    """

    couples_rows: bool

    @abc.abstractmethod
    def outputs(self, params: dict, batch: dict, dropout_keys: jax.Array | None = None) -> jax.Array:
        """Returns the outputs of the model, such as embeddings: `[rows, ...]`, without interaction between rows."""

    @abc.abstractmethod
    def loss_of_outputs(self, outputs: jax.Array, batch: dict) -> tuple[jax.Array, dict]:
        """Returns the loss and the metrics of a batch from the outputs of all rows."""


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
        """The definition of the carry; None if a step does not depend on the previous steps."""

    def init_params(self, key: jax.Array) -> dict:
        """Returns random params, boxed as `nn.LogicallyPartitioned`."""

    def is_frozen(self, path: tuple[str, ...]) -> bool:
        """Returns whether the task does not train the param at this path."""

    def layer_ids(self, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layer numbers of the param at this path, see `models.family.ModelFamily.layer_ids`."""

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yields this host's rows of the batches of steps `start_step`, `start_step + 1`, ..."""

    def loss_and_config(self, step: int) -> "tuple[Loss, ConfigDict]":
        """Returns the loss and the config of the update that follows `step` updates. Both depend on the stage."""

    def mask_updates(self, updates: dict, step: jax.Array) -> dict:
        """Zeroes the optimizer's updates of the params that are not trained at `step`, such as old token embeddings."""

    def flops(self, start: int, stop: int) -> int:
        """Returns the model FLOPs of steps `start` to `stop - 1`."""
