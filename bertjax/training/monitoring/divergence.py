"""What happens at a loss that is not finite: training stops, or leaves out this update; the batch is kept."""

import contextlib
import io
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import write_whole
from bertjax.training.task import Task

FOLDER = "nonfinite"  # in the workdir


class Diverged(UserError):
    """The loss or the gradient norm of a step is not finite."""


class NonFinite:
    """Checks the metrics of all steps.

    Args:
      skips: how many updates in a row may be left out, in this process; the compiled step does that if it is not 0.
      say: prints a line.
    """

    def __init__(self, task: Task, skips: int, schedule: Callable, workdir: epath.PathLike, say: Callable[[str], None]):
        self._task, self._skips, self._schedule, self._say = task, skips, schedule, say
        self._workdir, self._in_a_row = epath.Path(workdir), 0

    def check(self, first: int, metrics: Sequence[dict], has_checkpoint: bool) -> None:
        """Takes the metrics of the steps after step `first`. Raises `Diverged` if too many are not finite."""
        for step, found in enumerate(metrics, first + 1):
            if _is_finite(found):
                self._in_a_row = 0
                continue
            self._in_a_row += 1
            what = (
                f"the loss of step {step} is {found['loss']} (gradient norm {found['grad_norm']:.3g}, learning rate "
                f"{float(self._schedule(step - 1)):.3g})"
            )
            if self._in_a_row == 1:
                what += self._keep_batch(step)
            if self._in_a_row <= self._skips:
                self._say(f"{what}: left out this update, {self._in_a_row} in a row")
                continue
            remedy = "lower config.optimizer.learning_rate or lengthen the warm-up"
            if not self._skips:
                remedy += ", or set config.optimizer.skip_nonfinite to leave out a few such updates"
            if has_checkpoint:
                remedy += f". The checkpoints in {self._workdir} are from earlier steps"
            raise Diverged(f"training diverged: {what}; {remedy}")

    def finite(self, metrics: Sequence[dict]) -> list[dict]:
        """Returns the metrics to log: those of the finite steps, if there are any, and the share of the others."""
        found = [each for each in metrics if _is_finite(each)]
        skipped = {"skipped": 1 - len(found) / len(metrics)} if self._skips else {}
        return [{**each, **skipped} for each in found or metrics]

    def _keep_batch(self, step: int) -> str:
        """Writes this host's rows of the batch, which is a function of the step; returns what to say of it."""
        content = io.BytesIO()
        path = self._workdir / FOLDER / f"step{step}-host{jax.process_index()}.npz"
        try:
            with contextlib.closing(self._task.batches(step - 1)) as batches:
                np.savez_compressed(content, **next(batches))
            write_whole(path, content.getvalue())
        except (UserError, OSError) as error:
            return f" (its batch cannot be kept: {error})"
        return f", its batch is in {path}"


def _is_finite(metrics: dict) -> bool:
    return math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])  # either makes all params NaN
