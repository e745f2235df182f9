"""The interface of an evaluator."""

import abc
from collections.abc import Callable

from bertjax.training.scores import Scores


class Evaluator(abc.ABC):
    """Evaluates a model on held-out data during training, after training, and in `bertjax evaluate`."""

    @abc.abstractmethod
    def run(self, params: dict, step: int, after_batch: Callable[[], None] = lambda: None) -> Scores | None:
        """Returns the scores after `step` updates; None if there is no held-out data. All hosts must call this method.

        Args:
          params: params that `Loss.cast` has cast, gathered on the mesh of the run.
          step: the number of updates.
          after_batch: a function to call after each batch, on all hosts. The function raises an exception to stop the
            run.
        """

    def files(self) -> dict[str, str]:
        """Returns {file name: content} of the files of the last evaluation for the workdir, such as predictions."""
        return {}
