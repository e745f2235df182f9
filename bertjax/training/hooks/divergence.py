"""Stops a run whose loss is not finite, or leaves out a few such updates: `config.optimizer.skip_nonfinite`."""

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
Metrics = Mapping[str, np.float32]


class Diverged(UserError):
    """The loss or the gradient norm of a step is not finite."""


class Divergence(Hook):
    """Raises `Diverged` if more than `config.optimizer.skip_nonfinite` steps in a row are not finite.

    The compiled step leaves out their updates if the setting is not 0. Keeps the batch of the first of these steps.
    """

    _in_a_row = 0  # steps of this process, up to the last one, that are not finite

    def on_metrics(self, run: TrainingRun, metrics: Mapping[int, Metrics]) -> None:
        """Checks the metrics of all steps."""
        for step, step_metrics in metrics.items():
            if _is_finite(step_metrics):
                self._in_a_row = 0
            else:
                self._in_a_row += 1
                self._handle(run, step, step_metrics)

    def _handle(self, run: TrainingRun, step: int, metrics: Metrics) -> None:
        skips = run.config.optimizer.skip_nonfinite
        description = (
            f"the loss of step {step} is {metrics['loss']} (gradient norm {metrics['grad_norm']:.3g}, learning rate "
            f"{float(run.schedule(step - 1)):.3g})"
        )
        if self._in_a_row == 1:
            description += _keep_batch(run, step)
        if self._in_a_row <= skips:
            run.print(f"{description}: left out this update, {self._in_a_row} in a row")
            return
        remedy = "lower config.optimizer.learning_rate or lengthen the warm-up"
        if not skips:
            remedy += ", or set config.optimizer.skip_nonfinite to leave out a few such updates"
        if run.checkpoints.latest_step() is not None:
            remedy += f". The checkpoints in {run.workdir} are from earlier steps"
        raise Diverged(f"training diverged: {description}; {remedy}")


def finite_steps(metrics: Sequence[Metrics], skips: bool) -> list[dict]:
    """Returns the metrics of the finite steps, or of all steps if none is finite.

    Args:
      metrics: the metrics of each step.
      skips: adds `skipped`, the share of the steps that are not finite.
    """
    finite = [step_metrics for step_metrics in metrics if _is_finite(step_metrics)]
    share = {"skipped": 1 - len(finite) / len(metrics)} if skips else {}
    return [{**step_metrics, **share} for step_metrics in finite or metrics]


def _keep_batch(run: TrainingRun, step: int) -> str:
    """Writes this host's rows of the batch, which is a function of the step. Returns a clause for the message."""
    content = io.BytesIO()
    path = run.workdir / FOLDER / f"step{step}-host{jax.process_index()}.npz"
    try:
        with contextlib.closing(run.task.batches(step - 1)) as batches:  # type: ignore[type-var]
            np.savez_compressed(content, **next(batches))  # type: ignore[arg-type]
        write_whole(path, content.getvalue())
    except (UserError, OSError) as error:
        return f" (its batch cannot be kept: {error})"
    return f", its batch is in {path}"


def _is_finite(metrics: Metrics) -> bool:
    return math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])  # Either makes all params NaN.
