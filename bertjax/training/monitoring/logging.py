"""Logs the metrics of a run: writes the metrics to trackers, and prints a progress bar or lines."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import numpy as np
import tqdm
from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole
from bertjax.common.progress import Pace, duration, print_line
from bertjax.training.monitoring.clocks import PARTS, time_shares
from bertjax.training.trackers.jsonl import JsonLines, nonfinite_to_none, read_metrics
from bertjax.training.trackers.trackers import TRACKERS, tracker_names

MEASURED_SECONDS = 10.0  # seconds of training after which `Progress` estimates the time of the whole run
DAY = 86_400.0  # in seconds
UNREPORTED = "unreported_metrics_{}.json"  # file in the workdir; {} is the last step of the process


class _Unreported(TypedDict):
    """The content of `UNREPORTED`: the metrics of each step since the last report, and the seconds by `PARTS`."""

    metrics: list[dict[str, float | None]]
    wall: dict[str, float]


class MetricsWriter:
    """Writes metrics and the wall time to the trackers of a run.

    A report is a line of `metrics.jsonl` with the means of the metrics, and the seconds of each of `PARTS`, since the
    previous report. A resumed run does not write metrics that an earlier process has written, such as the evaluation at
    `start_step`.

    Attributes:
      wall_seconds: the seconds of each of `PARTS` in all processes of the run until the last report.
    """

    def __init__(self, workdir: epath.PathLike, start_step: int, config: ConfigDict):
        """Opens the trackers.

        Args:
          workdir: the folder of the run.
          start_step: the step of the checkpoint from which the run resumes; 0 for a new run.
          config: the config of the run.
        """
        workdir = self._workdir = epath.Path(workdir)
        lines = read_metrics(workdir)
        kept = [line for line in lines if line["step"] <= start_step]
        self.wall_seconds, self._unreported_seconds = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
        for line in lines:
            for part in PARTS:
                seconds = line.get(f"wall/{part}") or 0.0
                if line["step"] <= start_step:
                    self.wall_seconds[part] += seconds
                else:  # The resumed run repeats this step, so that this time is lost.
                    self._unreported_seconds["restart"] += seconds
        for path in workdir.glob(UNREPORTED.format("*")):
            if path.name != UNREPORTED.format(start_step):
                path.unlink(missing_ok=True)
        self._written = {(line["step"], name) for line in kept for name in line}
        factories = (JsonLines, *map(TRACKERS.get, tracker_names(config)))
        self._trackers = [factory(workdir, start_step, config) for factory in factories]

    def write_with_wall_time(self, step: int, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Writes a report: the metrics, and `wall/PART` with the seconds of each part since the last report."""
        seconds = self._add_unreported(seconds)
        for part in PARTS:
            self.wall_seconds[part] += seconds[part]
            self._unreported_seconds[part] = 0.0
        self.write(step, {**metrics, **{f"wall/{part}": seconds[part] for part in PARTS}})

    def write_last(self, step: int, seconds: Mapping[str, float]) -> None:
        """Writes the last report: the wall time, and `goodput/PART` with the share of each part in the whole run."""
        total = {part: self.wall_seconds[part] + more for part, more in self._add_unreported(seconds).items()}
        self.write_with_wall_time(
            step, seconds, {f"goodput/{part}": share for part, share in time_shares(total).items()}
        )

    def _add_unreported(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Adds the seconds of earlier processes that no report contains."""
        return {part: seconds[part] + self._unreported_seconds[part] for part in PARTS}

    def write_unreported(
        self, step: int, metrics: Sequence[Mapping[str, np.float32]], seconds: Mapping[str, float]
    ) -> None:
        """Writes the content of the next report to `UNREPORTED`, which the resumed run reads with `read_unreported`.

        Args:
          step: the last step of this process.
          metrics: the metrics of each step since the last report.
          seconds: the seconds since the last report, by `PARTS`.
        """
        values_of_steps = [
            nonfinite_to_none({name: float(value) for name, value in step_metrics.items()}) for step_metrics in metrics
        ]
        content = {"metrics": values_of_steps, "wall": self._add_unreported(seconds)}
        write_whole(self._workdir / UNREPORTED.format(step), json.dumps(content) + "\n")

    def read_unreported(self, step: int) -> list[Mapping[str, np.float32]]:
        """Returns the metrics of each step that `write_unreported` wrote; an empty list without the file.

        Adds the seconds in the file to the next report. Must be called once only.
        """
        path = self._workdir / UNREPORTED.format(step)
        unreported: _Unreported = {"metrics": [], "wall": {}}
        try:
            if path.exists():
                unreported = read_json(path, _Unreported)
        except UserError as error:
            print(f"{error}; the run continues without these metrics", flush=True)
            return []
        for part in PARTS:
            self._unreported_seconds[part] += unreported["wall"].get(part, 0.0)
        return [
            {name: np.float32(np.nan if value is None else value) for name, value in metrics.items()}
            for metrics in unreported["metrics"]
        ]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes metrics of a step, unless an earlier process has written all of them."""
        if all((step, name) in self._written for name in metrics):
            return
        for tracker in self._trackers:
            tracker.write(step, metrics)

    def flush(self) -> None:
        """Flushes the trackers, so that a resumed run can read the metrics."""
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Closes the trackers."""
        for tracker in self._trackers:
            tracker.close()


class Progress:
    """Shows the progress of a run: a progress bar if stdout is a terminal, and lines otherwise.

    Prints a line after the first step, at each call of `report`, and when `Pace.is_due`. No method reads arrays on the
    devices, which would wait for the step.
    """

    def __init__(
        self, total_steps: int, start_step: int, flops: Callable[[int, int], int], suggests_budget: bool = False
    ):
        """Opens the progress bar.

        Args:
          total_steps: the number of steps of the run.
          start_step: the step from which the run resumes; 0 for a new run.
          flops: (start, stop) -> the FLOPs of steps `start` to `stop - 1`, to estimate the time left.
          suggests_budget: whether to suggest `config.budget`, once, if the run will take more than a day.
        """
        self._total, self._flops, self._suggests_budget = total_steps, flops, suggests_budget
        self._pace, self._metrics, self._has_lines = Pace(), "", False
        # (step, seconds of training until the end of this step): at the start, and at the last printed line.
        self._started = self._marked = (start_step, 0.0)
        self._bar: tqdm.tqdm | None = None
        # A terminal of unknown size has 0 columns.
        if sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns:
            self._bar = tqdm.tqdm(
                total=total_steps,
                initial=start_step,
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} |{bar:12}| {desc}",
                file=sys.stdout,
            )

    def start(self, seconds: float) -> None:
        """Starts the measurement of the speed, after the first batch is read.

        Args:
          seconds: the seconds of training until now, by `Clocks.training_seconds`.
        """
        self._started = self._marked = (self._started[0], seconds)
        self._pace = Pace()

    def advance(self, done: int, seconds: float) -> None:
        """Advances the progress bar by a step, or prints a line if a line is due.

        Args:
          done: the last step that the devices have finished. The host has dispatched up to `STEPS_IN_FLIGHT` more.
          seconds: the seconds of training until now, by `Clocks.training_seconds`.
        """
        if self._bar is not None:
            self._bar.update()
        is_first, measured = not self._has_lines, seconds - self._started[1]
        if self._suggests_budget and done > self._started[0] and measured >= MEASURED_SECONDS * (1 + is_first):
            self._suggests_budget = False
            expected = self._seconds_left(self._started, done, seconds)
            if expected > DAY:
                print_line(
                    f"this run will take about {duration(expected)} on this machine; for a run of 8 hours, set "
                    f"--config.budget=8h and another --workdir"
                )
        marked_step, marked_seconds = self._marked
        if done > marked_step and (is_first or self._pace.is_due()):
            if is_first:  # The first step may be slower, so that the measurement starts after the first step.
                self._show(done, "")
                self._started = (done, seconds)
            else:
                left = duration(self._seconds_left(self._marked, done, seconds))
                self._show(done, f"{(seconds - marked_seconds) / (done - marked_step):.2f} s a step {left} left")
            self._mark(done, seconds)

    def report(self, step: int, seconds: float, metrics: dict[str, float], seconds_left: float) -> None:
        """Prints the means of the metrics since the last report.

        Args:
          step: the current step.
          seconds: the seconds of training until now, by `Clocks.training_seconds`.
          metrics: the means by name, such as "train/loss".
          seconds_left: the estimated seconds until the end of training.
        """
        self._metrics = format_metrics(metrics)
        self._show(step, f"{duration(seconds_left)} left", self._metrics)
        self._mark(step, seconds)

    def _show(self, step: int, pace: str, metrics: str = "") -> None:
        if self._bar is not None:
            self._bar.set_description_str(f"{self._metrics} {pace}".strip())
        else:
            print(f"step {step}/{self._total} {metrics} {pace}".replace("  ", " ").strip(), flush=True)

    def _mark(self, step: int, seconds: float) -> None:
        self._marked, self._has_lines = (step, seconds), True
        self._pace.printed()

    def _seconds_left(self, mark: tuple[int, float], done: int, seconds: float) -> float:
        """Returns the estimated seconds for the steps after `done`, at the FLOPs per second since `mark`."""
        marked_step, marked_seconds = mark
        return (seconds - marked_seconds) * self._flops(done, self._total) / self._flops(marked_step, done)

    def close(self) -> None:
        """Closes the progress bar."""
        if self._bar is not None:
            self._bar.close()


def format_metrics(metrics: dict[str, float]) -> str:
    """Formats metrics such as "train/loss" as one line. Omits metrics such as gradient norms."""
    parts: list[str] = []
    for name, value in metrics.items():
        name = name.removeprefix("train/")
        if name.endswith("accuracy") or name == "mfu":
            parts.append(f"{name.removesuffix('_accuracy')} {value:.1%}")
        elif name.endswith("_per_second"):
            parts.append(f"{value:,.0f} {name.removesuffix('_per_second')}/s")
        elif name == "real_tokens_share":
            parts.append(f"{value:.1%} real")
        elif name == "learning_rate":
            parts.append(f"lr {value:.2e}")
        elif name == "loss":
            parts.insert(0, f"loss {value:.3f}")
    return " ".join(parts)
