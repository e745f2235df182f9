"""Reports steps that take much longer than usual, see `config.watchdog`."""

import collections
import statistics
from collections.abc import Mapping

import jax

from bertjax.common.progress import print_line
from bertjax.training.hooks.hook import Hook, TrainingRun

MIN_SLOW_SECONDS = 1.0  # Steps that take less time are never reported.


class Watchdog(Hook):
    """Prints a line for each step that takes `config.watchdog` times as long as the median of the last 100 steps.

    Every host prints lines about the steps on this host. `config.watchdog` = 0 disables the hook.
    """

    def on_start(self, run: TrainingRun) -> None:
        """Clears the times of earlier steps."""
        self._recent: collections.deque[float] = collections.deque(maxlen=100)  # seconds per step

    def on_step(self, run: TrainingRun, metrics: Mapping[str, jax.Array]) -> None:
        """Compares the time of the step with the times of earlier steps."""
        del metrics
        if not run.is_stopping and (text := self._describe(run.step, run.config.watchdog, run.clocks.step_seconds())):
            print_line(text)

    def _describe(self, step: int, factor: float, seconds_by_cause: Mapping[str, float]) -> str:
        """Returns a line about a slow step; "" if the step is not slow.

        Args:
          step: the number of the step.
          factor: `config.watchdog`.
          seconds_by_cause: the result of `Clocks.step_seconds`. Evaluation and compilation are not part of a step.
        """
        seconds = sum(seconds_by_cause.values()) - seconds_by_cause["evaluation"] - seconds_by_cause["compile"]
        median = statistics.median(self._recent) if len(self._recent) >= 10 else seconds
        self._recent.append(seconds)
        if not factor or seconds < max(factor * median, MIN_SLOW_SECONDS):
            return ""
        is_single_host = jax.process_count() == 1
        causes = {
            "data": "waiting for data",
            "devices": "waiting for the devices" if is_single_host else "waiting for the devices or other hosts",
            "checkpoints": "saving a checkpoint",
            "others": "other work of this process",
        }
        parts = sorted(((seconds_by_cause[name], cause) for name, cause in causes.items()), reverse=True)
        described = [f"{cause} took {time:.1f} s" for time, cause in parts if time > 0.1 * seconds]
        where = "" if is_single_host else f" on host {jax.process_index()}"
        return f"Step {step} was slow{where} ({seconds:.1f} s, usually {median:.1f} s): {', '.join(described)}."
