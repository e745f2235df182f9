"""Stops a run after steps with a nonfinite loss or gradient norm, see `config.optimizer.skip_nonfinite`."""

import contextlib
import io
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.training.hooks.hook import Hook, TrainingRun

FOLDER = "nonfinite"  # in the workdir
Metrics = Mapping[str, np.float32]  # metrics of one step, by name


class DivergenceError(UserError):
    """The loss or the gradient norm is not finite in too many steps in a row."""


class CheckDivergence(Hook):
    """Raises `DivergenceError` if more than `config.optimizer.skip_nonfinite` steps in a row are not finite.

    The compiled step skips the update of a nonfinite step, unless `skip_nonfinite` is 0. Of several nonfinite steps in
    a row, the hook writes the batch of the first step to the workdir.
    """

    _in_a_row = 0  # the number of consecutive nonfinite steps up to the last step, in this process

    def on_metrics(self, run: TrainingRun, metrics: Mapping[int, Metrics]) -> None:
        """Checks the metrics of all steps."""
        for step, step_metrics in metrics.items():
            if _is_finite(step_metrics):
                self._in_a_row = 0
            else:
                self._in_a_row += 1
                self._skip_or_raise(run, step, step_metrics)

    def _skip_or_raise(self, run: TrainingRun, step: int, metrics: Metrics) -> None:
        """Prints that the update was skipped. After too many nonfinite steps in a row, raises `DivergenceError`."""
        max_skips = run.config.optimizer.skip_nonfinite
        description = (
            f"the loss of step {step} is {metrics['loss']} (gradient norm {metrics['grad_norm']:.3g}, learning rate "
            f"{float(run.schedule(step - 1)):.3g})"
        )
        if self._in_a_row == 1:
            description += _save_batch(run, step)
        if self._in_a_row <= max_skips:
            run.print(f"{description}: skipped this update, {self._in_a_row} in a row")
            return
        remedy = "lower config.optimizer.learning_rate or lengthen the warm-up"
        if not max_skips:
            remedy += ", or set config.optimizer.skip_nonfinite=N to skip up to N such updates in a row"
        if run.checkpoints.latest_step() is not None:
            remedy += f". The checkpoints in {run.workdir} are from earlier steps"
        raise DivergenceError(f"training diverged: {description}; {remedy}")


def finite_steps(metrics: Sequence[Metrics], add_skipped: bool) -> list[dict]:
    """Returns the metrics of the finite steps, or of all steps if no step is finite.

    Args:
      metrics: the metrics of each step.
      add_skipped: whether to add the metric `skipped`, the share of nonfinite steps in 0 to 1, to each step.
    """
    finite = [step_metrics for step_metrics in metrics if _is_finite(step_metrics)]
    share = {"skipped": 1 - len(finite) / len(metrics)} if add_skipped else {}
    return [{**step_metrics, **share} for step_metrics in finite or metrics]


def _save_batch(run: TrainingRun, step: int) -> str:
    """Reads the batch of a step again, and writes this host's rows to a file. Returns a clause for the message."""
    content = io.BytesIO()
    path = run.workdir / FOLDER / f"step{step}-host{jax.process_index()}.npz"
    try:
        with contextlib.closing(run.task.batches(step - 1)) as batches:  # type: ignore[type-var]
            np.savez_compressed(content, **next(batches))  # type: ignore[arg-type]
        write_whole(path, content.getvalue())
    except (UserError, OSError) as error:
        return f" (the batch of this step cannot be saved: {error})"
    return f"; the batch of this step is in {path}"


def _is_finite(metrics: Metrics) -> bool:
    # A NaN in either metric makes all params NaN.
    return math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
