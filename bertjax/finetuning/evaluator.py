"""The evaluator of fine-tuning."""

from collections.abc import Callable
from typing import Any

from bertjax.inference.predictor import Predictor
from bertjax.inference.task import TaskData
from bertjax.training.evaluator import Evaluator
from bertjax.training.scores import Scores


class FineTuningEvaluator(Evaluator):
    """Scores predictions for the dev splits of a task."""

    def __init__(self, data: TaskData, predictor: Predictor) -> None:
        self._data, self._predictor = data, predictor
        self._predictions: list[Any] = []  # the predictions of the last evaluation, one entry for each dev split

    def run(self, params: dict, step: int, after_batch: Callable[[], None] = lambda: None) -> Scores:
        """Returns the scores of all dev splits, see `Evaluator.run`."""
        scores: dict[str, float] = {}
        decided: dict[str, float] = {}
        self._predictions = []
        for split in self._data.dev:
            predictions = split.decode(self._predictor(params, split.examples, lambda _: after_batch()))
            scores |= split.score(predictions)
            decided |= split.decide(predictions)
            self._predictions.append(predictions)
        measured_on = f"{sum(len(split.examples) for split in self._data.dev)} dev examples"
        return Scores(dict(scores), scores[self._data.metric], measured_on, decided)

    def files(self) -> dict[str, str]:
        """Returns the predictions of the last evaluation."""
        files: dict[str, str] = {}
        for split, predictions in zip(self._data.dev, self._predictions):
            files |= split.files(predictions)
        return files
