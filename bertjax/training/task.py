"""What the training loop knows of a task, and no more."""

from collections.abc import Callable, Iterator
from typing import Protocol

import jax

from bertjax.sharding.mesh import Batch
from bertjax.training.checkpoint import Scores


class Task(Protocol):
    """What is learnt: pre-training, or any fine-tuning task."""

    total_steps: int
    frozen: tuple[str, ...]  # parts of the params, by their name at the top, that are not trained

    def init_params(self, key: jax.Array) -> dict:
        """Random params, logically partitioned."""

    def batches(self, start_step: int) -> Iterator[Batch]:
        """This host's rows of the batches of `start_step`, `start_step + 1`, ..."""

    def normalize(self, batch: dict) -> dict:
        """Scales a whole batch's weights so that the losses of its microbatches add up to the loss of the batch."""

    def cast(self, params: dict) -> dict:
        """Params in the types that `loss` and `evaluate` compute with: what travels between devices."""

    def loss(self, params: dict, batch: dict, dropout_keys: jax.Array | None) -> tuple[jax.Array, dict]:
        """Loss, and metrics that add up likewise; among them `tokens`, the number of real ones.

        `params` are cast. `dropout_keys` are random keys, one for each row of the batch; None: no dropout.
        """

    def evaluate(self, params: dict, step: int, after_batch: Callable[[], None]) -> Scores | None:
        """Scores on held-out data after `step` updates; None where there is none. `params` are cast.

        Calls `after_batch` between batches, on all hosts alike; it raises where the run is to stop.
        """

    def files(self) -> dict[str, str]:
        """Name and content of files that the last evaluation makes for the workdir: predictions, say."""

    def flops(self, start: int, stop: int) -> int:
        """Model FLOPs of the steps from `start` to before `stop`."""
