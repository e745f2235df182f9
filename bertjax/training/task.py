"""The interface between the training loop and a task."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import ml_collections
import numpy as np

from bertjax.distributed.mesh import Batch
from bertjax.training.scores import Scores


class Recurrence(NamedTuple):
    """How the rows of a batch go on where they ended in the step before.

    Attributes:
      new_memory: () -> what rows remember that have read nothing: a tree of arrays `[rows, ...]`.
      reach: after so many steps, what rows remember does not depend on what they did before.
    """

    new_memory: Callable[[], Any]
    reach: int


class Task(Protocol):
    """Pre-training, or a fine-tuning task.

    Attributes:
      total_steps: the updates of a run.
      recurrence: None: each step reads rows by themselves. Else `loss` gets the memory of the state as `memory` of the
        batch, and returns what rows then remember as `memory` of the metrics.
      couples_rows: whether the loss of a row depends on others of its batch. Then there are `outputs` and
        `loss_of_outputs`, of which `loss` is made, and these call `jax.lax.all_gather(..., mesh.GROUPS)` for the rows
        of other groups of devices.
    """

    total_steps: int
    couples_rows: bool
    recurrence: Recurrence | None

    def init_params(self, key: jax.Array) -> dict:
        """Returns random params, logically partitioned."""

    def is_frozen(self, path: tuple[str, ...]) -> bool:
        """Returns whether the task does not train the param at this path."""

    def layer_numbers(self, path: tuple[str, ...]) -> np.ndarray | None:
        """Returns the number of the layer that the param at this path is of, or those of the layers that it stacks, as
        `models.family.ModelFamily.layer_ids` says."""

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yields this host's rows of the batches of steps `start_step`, `start_step + 1`, ..."""

    def at(self, step: int) -> tuple["Task", ml_collections.ConfigDict]:
        """Returns the task and the config of the update after `step` others; stages of pre-training change both."""

    def normalize(self, batch: dict) -> dict:
        """Scales the weights of a global batch so that the losses of its microbatches sum to the loss of the batch."""

    def cast(self, params: dict) -> dict:
        """Casts params to the types that `loss` and `evaluate` compute with, before they are gathered."""

    def loss(self, params: dict, batch: dict, dropout_keys: jax.Array | None) -> tuple[jax.Array, dict]:
        """Returns the loss and metrics, all sums over rows; the metrics `tokens` and `padding` are numbers of tokens.

        `params` are cast. `dropout_keys` `[rows]` are random keys; None turns dropout off.
        """

    def outputs(self, params: dict, batch: dict, dropout_keys: jax.Array | None) -> jax.Array:
        """Returns what `loss_of_outputs` needs of the model, `[rows, ...]`: a function of each row by itself."""

    def loss_of_outputs(self, outputs: jax.Array, batch: dict) -> tuple[jax.Array, dict]:
        """As `loss`, of what the model has said of all rows of the batch."""

    def limited(self, updates: dict, step: jax.Array) -> dict:
        """Returns what is added to the params in the update after `step` others, of what the optimizer wants to add."""

    def evaluate(self, params: dict, step: int, after_batch: Callable[[], None]) -> Scores | None:
        """Evaluates on held-out data after `step` updates; returns None if there is none. `params` are cast.

        All hosts call `after_batch` after each batch; it raises if the run must stop.
        """

    def files(self) -> dict[str, str]:
        """Returns {name: content} of files for the workdir from the last evaluation, such as predictions."""

    def flops(self, start: int, stop: int) -> int:
        """Returns the model FLOPs of steps `start` to `stop - 1`."""
