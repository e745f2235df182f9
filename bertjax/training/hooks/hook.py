"""The base class of hooks, and the run that their methods receive."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bertjax.common.progress import print_line

if TYPE_CHECKING:
    import jax
    import numpy as np
    from etils import epath
    from jax.sharding import Mesh
    from ml_collections import ConfigDict

    from bertjax.training.checkpoints.checkpoint import Checkpoints
    from bertjax.training.monitoring.clocks import Clocks
    from bertjax.training.optim.schedules import Schedule
    from bertjax.training.scores import Scores
    from bertjax.training.state import TrainState
    from bertjax.training.step import Program
    from bertjax.training.task import Task


@dataclasses.dataclass(eq=False)
class TrainingRun:
    """A run during training. The loop updates this object, and hooks read it.

    Attributes:
      config: the config of the run.
      workdir: the folder of the run.
      mesh: the devices.
      task: the task that is trained.
      state: the state after the last update: params, optimizer state, and step. The next step reuses the memory of its
        arrays: copy arrays that a hook keeps.
      start_step: the step from which this process resumed or branched off; 0 in a new run.
      is_first_host: whether this host writes the files of the run.
      program: the compiled functions, such as the training step.
      schedule: (number of earlier updates) -> learning rate.
      checkpoints: the checkpoints of the run.
      clocks: the wall time of this process, in seconds, by parts such as steps and evaluation.
      hooks: the hooks of the run, in the order of their calls.
      scores: the scores of the last evaluation; None before the first evaluation.
      step: the number of the current or last step, counted from 1; `start_step` before the first step.
      step_config: the config of this step: `config` with the values of the stage of pre-training.
      is_stopping: whether a signal stops the run after this step.
      should_stop: () -> whether a signal stops the run. All hosts must call the function the same number of times.
    """

    config: "ConfigDict"
    workdir: "epath.Path"
    mesh: "Mesh"
    task: "Task"
    state: "TrainState"
    start_step: int
    is_first_host: bool
    program: "Program"
    schedule: "Schedule"
    checkpoints: "Checkpoints"
    clocks: "Clocks"
    hooks: Sequence["Hook"] = ()
    scores: "Scores | None" = None
    step: int = dataclasses.field(init=False)
    step_config: "ConfigDict" = dataclasses.field(init=False)
    is_stopping: bool = False
    should_stop: Callable[[], bool] = lambda: False
    _save_requested: bool = False
    _evaluation_requested: bool = False
    _end_requested: bool = False

    def __post_init__(self) -> None:
        """Sets the fields that change with each step to their values before the first step."""
        self.step, self.step_config = self.start_step, self.config

    @property
    def total_steps(self) -> int:
        """The number of updates of the whole run."""
        return self.task.total_steps

    @property
    def is_last_step(self) -> bool:
        """Whether training ends after this step."""
        return self._end_requested or self.step == self.total_steps

    @property
    def is_evaluation_requested(self) -> bool:
        """Whether a hook has requested an evaluation or the end of the run at this step."""
        return self._evaluation_requested or self._end_requested

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the model is evaluated at the end of this step."""
        is_scheduled = self.step > 0 and self.step % self.config.eval.every_steps == 0
        return self.is_evaluation_requested or self.is_last_step or is_scheduled

    @property
    def is_save_due(self) -> bool:
        """Whether a checkpoint is saved at the end of this step. Every step that is evaluated is saved."""
        return self._save_requested or self.is_evaluation_due or self.step % self.config.checkpoint.every_steps == 0

    def print(self, text: str) -> None:
        """Prints a line on the first host, above the progress bar."""
        if self.is_first_host:
            print_line(text)

    def save(self) -> None:
        """Requests a checkpoint at the end of this step. All hosts must call this method at the same step."""
        self._save_requested = True

    def evaluate(self) -> None:
        """Requests a checkpoint and an evaluation at the end of this step.

        All hosts must call this method at the same step.
        """
        self._evaluation_requested = True

    def end(self) -> None:
        """Ends training after this step, with a checkpoint and an evaluation.

        All hosts must call this method at the same step. The same command resumes the run.
        """
        self._end_requested = True

    def finish_step(self) -> None:
        """Clears the requests for a checkpoint and an evaluation. The loop calls this method after each step."""
        self._save_requested = self._evaluation_requested = False


class Hook:
    """The base class of callbacks of the training loop. A subclass overrides the methods that it needs.

    Pass instances to `bertjax.train`, or register the class with `bertjax.training.hooks.register`: a run creates an
    instance, without arguments, of each class that `config.hooks` names.

    The methods are called on all hosts, and in the same order: first on the hooks of a user, then on the built-in
    hooks. A call that all hosts must make together, such as `run.save()`, must not depend on `run.is_first_host`.

    An exception in a hook stops the run. No further checkpoint is saved, all hooks receive the exception in `on_end`,
    and the same command resumes from the last checkpoint.

    In the report of the wall time, `on_start` counts as start-up, `on_evaluation` counts as evaluation, and the methods
    that are called between them count as steps.
    """

    def on_start(self, run: TrainingRun) -> None:
        """Is called once, after the state is restored or initialized and before the first step.

        A hook may replace `run.state` here.
        """

    def before_step(self, run: TrainingRun) -> None:
        """Is called before the batch of step `run.step` is read."""

    def on_batch(self, run: TrainingRun, batch: Mapping[str, "jax.Array"]) -> None:
        """Is called before step `run.step`, after its batch is copied to the devices.

        Args:
          run: the run.
          batch: {name: array `[rows, ...]`}, with the rows of all hosts and microbatches.
        """

    def on_step(self, run: TrainingRun, metrics: Mapping[str, "jax.Array"]) -> None:
        """Is called after step `run.step`, before the step is reported, saved or evaluated.

        Args:
          run: the run. `run.state` is the new state.
          metrics: {name: scalar on the devices}, such as "loss" and "grad_norm". Reading a value waits until the
            devices have finished the step, and the devices are then idle until the next step. `on_metrics` receives
            the same values later, without this wait.
        """

    def on_metrics(self, run: TrainingRun, metrics: Mapping[int, Mapping[str, "np.float32"]]) -> None:
        """Is called every `config.log_every_steps` steps, and before each checkpoint.

        Args:
          run: the run.
          metrics: {step: {name: value}} of all steps since the last call, as scalars on the host.
        """

    def on_save(self, run: TrainingRun) -> None:
        """Is called when a checkpoint of `run.step` is saved, after the state is copied to the host.

        The checkpoint is written in the background, and may be unfinished. It does not contain requests that this
        method makes, such as `run.evaluate()`.
        """

    def on_evaluation(self, run: TrainingRun, scores: "Scores") -> None:
        """Is called after the evaluation of step `run.step`, before the scores are printed and stored.

        Args:
          run: the run. `run.scores` are the scores of the evaluation before.
          scores: the scores; `scores.scores` is {metric: value}.
        """

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Is called once at the end, also after an error, if `on_start` of this hook has returned.

        The hooks are called in the reverse order.

        Args:
          run: the run, with its last state and scores.
          error: the exception that ends training, such as `KeyboardInterrupt`; None if training has finished.
        """
