"""The interface of an evaluator."""

import abc
from collections.abc import Callable

from bertjax.training.scores import Scores


class Evaluator(abc.ABC):
    """Evaluates a model on held-out data: in training, after training, and in `bertjax evaluate`."""

    @abc.abstractmethod
    def run(self, params: dict, step: int, after_batch: Callable[[], None] = lambda: None) -> Scores | None:
        """Returns the scores after `step` updates; None if there is no held-out data. All hosts call it together.

        Args:
          params: the params, cast to the types that the model computes with, on the mesh of the run.
          step: the number of updates.
          after_batch: is called after each batch, on all hosts. It raises an exception if the run must stop.
        """

    def files(self) -> dict[str, str]:
        """Returns {name: content} of files for the workdir from the last evaluation, such as predictions."""
        return {}
