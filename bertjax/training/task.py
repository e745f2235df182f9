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
        """Returns the loss and the metrics of a batch. `jax.jit` traces and differentiates the method.

        Args:
          params: the result of `cast`.
          batch: {name: array `[rows, ...]`}: the result of `normalize`, or some of its rows, such as a microbatch or
            the rows of one group of devices. If `Task.carry` is not None, `batch["carry"]` is the carry of the rows.
          dropout_keys: `[rows]` random keys; None for no dropout.

        Returns:
          The loss, a float32 scalar, and {metric: scalar}. The training step adds the loss and the metrics of all
          microbatches and groups, so that they must be sums over the rows. The metrics "tokens" and "padding" are
          required: the numbers of tokens and of padding tokens. If `Task.carry` is not None, the entry "carry" is the
          carry of the rows for the next step.
        """

    @abc.abstractmethod
    def normalize(self, batch: dict) -> dict:
        """Normalizes the weights of a batch, so that the losses of its microbatches sum to the mean loss of the batch.

        Args:
          batch: {name: array `[rows, ...]`} with the rows of all hosts.

        Returns:
          The batch with added or replaced arrays `[rows, ...]`.
        """

    @abc.abstractmethod
    def cast(self, params: dict) -> dict:
        """Casts stored params to the dtypes of the loss and the evaluation. The params are gathered after the cast.

        Args:
          params: the float32 params of the state, a nested dict of arrays.

        Returns:
          Params with the same keys and shapes.
        """


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
        """Returns the outputs of the model, such as embeddings, without interaction between rows.

        Args:
          params: the result of `cast`.
          batch: the arrays of some rows, `[rows, ...]`.
          dropout_keys: `[rows]` random keys; None for no dropout.

        Returns:
          An array `[rows, ...]`.
        """

    @abc.abstractmethod
    def loss_of_outputs(self, outputs: jax.Array, batch: dict) -> tuple[jax.Array, dict]:
        """Returns the loss and the metrics of a batch, see `Loss.__call__`.

        Args:
          outputs: the result of `outputs` for all rows of a group of devices, `[rows, ...]`.
          batch: the arrays of these rows.
        """


class Task(Protocol):
    """The model, the data and the loss that the training loop trains: pre-training, or a fine-tuning task.

    A step is one update. In this class, `step` is the number of earlier updates, which is 0 for the first step.

    Attributes:
      total_steps: the number of updates of a run.
    """

    total_steps: int

    @property
    def evaluator(self) -> Evaluator:
        """The evaluator of the run, which the training loop calls on all hosts."""

    @property
    def carry(self) -> Carry | None:
        """The definition of the carry; None if a step does not depend on the previous steps."""

    def init_params(self, key: jax.Array) -> dict:
        """Returns random params. The method is compiled with `jax.jit`.

        Args:
          key: the random key of the run.

        Returns:
          A nested dict of float32 arrays, boxed as `nn.LogicallyPartitioned` with the names of their logical axes. The
          encoder is the entry "bert".
        """

    def is_frozen(self, path: tuple[str, ...]) -> bool:
        """Returns whether the task does not train the param at a path, such as ("bert", "pooler", "dense", "bias")."""

    def layer_ids(self, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the layer numbers of the param at a path, see `models.family.ModelFamily.layer_ids`.

        Args:
          path: the path in the params of the task, such as ("bert", "embeddings", "word", "embedding").

        Returns:
          The layer numbers, an integer array `[]` or `[layers]`; None for a param of a head.
        """

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yields the batches of the steps `start_step`, `start_step + 1`, ..., `total_steps - 1`.

        A batch depends only on the step, and not on `start_step`, so that a resumed run reads the same batches.

        Args:
          start_step: the first step.

        Yields:
          {name: NumPy array `[rows, ...]`} with the rows of this host, `bertjax.distributed.mesh.local_rows`.
        """

    def loss_and_config(self, step: int) -> "tuple[Loss, ConfigDict]":
        """Returns the loss and the config of a step. Steps of different stages can have different losses and configs.

        Args:
          step: the number of earlier updates.

        Returns:
          The loss, and the config of the run with the values of the stage of this step.
        """

    def mask_updates(self, updates: dict, step: jax.Array) -> dict:
        """Zeroes the updates of params that are not trained at a step. `jax.jit` traces the method.

        For example, `adapt.new_pieces_first` trains only the embeddings of new tokens in the first steps.

        Args:
          updates: a nested dict of the changes of the trainable params, which the optimizer has computed.
          step: the number of earlier updates, an int32 scalar.

        Returns:
          The updates, of the same keys and shapes.
        """

    def flops(self, start: int, stop: int) -> int:
        """Returns the model FLOPs of the steps `start` to `stop - 1` on all hosts, forward and backward."""
