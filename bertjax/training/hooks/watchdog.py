"""Notices steps that take much longer than usual: `config.watchdog`."""

import collections
import statistics
from collections.abc import Mapping

import jax

from bertjax.common.progress import print_line
from bertjax.training.hooks.hook import Hook, TrainingRun

STALL_SECONDS = 1.0  # A shorter step never counts as slow, however short the other steps are.


class Watchdog(Hook):
    """Prints a sentence about each step that takes `config.watchdog` times as long as the median of the last 100.

    Every host prints its sentences. `config.watchdog` = 0 turns the hook off.
    """

    def on_start(self, run: TrainingRun) -> None:
        """Starts without times of steps."""
        self._recent: collections.deque[float] = collections.deque(maxlen=100)

    def on_step(self, run: TrainingRun, metrics: Mapping[str, jax.Array]) -> None:
        """Compares the time of the step with the times of earlier steps."""
        del metrics
        if not run.is_stopping and (text := self._describe(run.step, run.config.watchdog, run.clocks.step())):
            print_line(text)

    def _describe(self, step: int, factor: float, waits: Mapping[str, float]) -> str:
        """Returns a sentence about a slow step, or "".

        Args:
          step: the number of the step.
          factor: `config.watchdog`.
          waits: the result of `Clocks.step`. Neither evaluation nor compiling belongs to a step.
        """
        seconds = sum(waits.values()) - waits["evaluation"] - waits["compile"]
        median = statistics.median(self._recent) if len(self._recent) >= 10 else seconds
        self._recent.append(seconds)
        if not factor or seconds < max(factor * median, STALL_SECONDS):
            return ""
        is_alone = jax.process_count() == 1
        causes = {
            "data": "waiting for data",
            "devices": "waiting for the devices" if is_alone else "waiting for the devices or other hosts",
            "checkpoints": "saving a checkpoint",
            "others": "other work of this process",
        }
        parts = sorted(((waits[name], cause) for name, cause in causes.items()), reverse=True)
        described = [f"{cause} took {time:.1f} s" for time, cause in parts if time > 0.1 * seconds]
        where = "" if is_alone else f" on host {jax.process_index()}"
        return f"Step {step} was slow{where} ({seconds:.1f} s, usually {median:.1f} s): {', '.join(described)}."
