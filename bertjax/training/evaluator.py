"""The interface of an evaluator."""

import abc
from collections.abc import Callable

from bertjax.training.scores import Scores


class Evaluator(abc.ABC):
    """Evaluates a model on held-out data during training, and after the last step."""

    @abc.abstractmethod
    def run(self, params: dict, step: int, after_batch: Callable[[], None] = lambda: None) -> Scores | None:
        """Returns the scores after `step` updates; None if there is no held-out data. All hosts must call this method.

        Args:
          params: params that `Loss.cast` has cast, gathered on the mesh of the run.
          step: the number of updates.
          after_batch: a function that the method must call after each batch, on all hosts. The function raises an
            exception to stop the run. The method must not catch this exception.

        Returns:
          The scores, equal on all hosts. `Scores.score` ranks checkpoints, higher is better.
        """

    def files(self) -> dict[str, str]:
        """Returns {file name: text} of the last evaluation, such as predictions; {} by default.

        The training loop writes the files to the workdir after an evaluation that is the best of the run.
        """
        return {}
