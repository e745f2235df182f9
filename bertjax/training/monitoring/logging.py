"""Logs the metrics of a run: writes numbers to trackers, and prints a progress bar or lines."""

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
from bertjax.training.monitoring.clocks import PARTS, shares
from bertjax.training.trackers.jsonl import JsonLines, finite, read_metrics
from bertjax.training.trackers.trackers import TRACKERS, tracker_names

MEASURED_SECONDS = 10.0  # seconds of training before the time of a run is estimated
DAY = 86_400.0  # in seconds
UNREPORTED = "unreported_metrics_{}.json"


class _Unreported(TypedDict):
    """The content of `UNREPORTED`: the metrics of each step since the last line, and the seconds since then."""

    metrics: list[dict[str, float | None]]
    wall: dict[str, float]


class MetricsWriter:
    """Writes metrics, and the wall time of the steps, to the trackers of a run.

    A resumed run writes no number again, such as the evaluation at `start_step`.

    Attributes:
      wall: seconds of all processes of the run until now, by `PARTS`.
    """

    def __init__(self, workdir: epath.PathLike, start_step: int, config: ConfigDict):
        """Opens the trackers.

        Args:
          workdir: the folder of the run.
          start_step: the step of the checkpoint that the run resumes, 0 for a new run.
          config: the config of the run.
        """
        workdir = self._workdir = epath.Path(workdir)
        lines = read_metrics(workdir)
        kept = [line for line in lines if line["step"] <= start_step]
        self.wall, self._carried = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
        for line in lines:
            for part in PARTS:
                seconds = line.get(f"wall/{part}") or 0.0
                if line["step"] <= start_step:
                    self.wall[part] += seconds
                else:  # The resumed run repeats this step.
                    self._carried["restart"] += seconds
        for path in workdir.glob(UNREPORTED.format("*")):
            if path.name != UNREPORTED.format(start_step):
                path.unlink(missing_ok=True)
        self._written = {(line["step"], name) for line in kept for name in line}
        makers = (JsonLines, *map(TRACKERS.get, tracker_names(config)))
        self._trackers = [make(workdir, start_step, config) for make in makers]

    def write_wall(self, step: int, seconds: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Writes metrics with the seconds since the last line, by `PARTS`."""
        seconds = self._with_carried(seconds)
        for part in PARTS:
            self.wall[part] += seconds[part]
            self._carried[part] = 0.0
        self.write(step, {**metrics, **{f"wall/{part}": seconds[part] for part in PARTS}})

    def write_end(self, step: int, seconds: Mapping[str, float]) -> None:
        """As `write_wall`, with the shares of all seconds of the run."""
        whole = {part: self.wall[part] + more for part, more in self._with_carried(seconds).items()}
        self.write_wall(step, seconds, {f"goodput/{part}": share for part, share in shares(whole).items()})

    def _with_carried(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Adds the seconds of earlier processes that no line contains."""
        return {part: seconds[part] + self._carried[part] for part in PARTS}

    def keep_unreported(
        self, step: int, metrics: Sequence[Mapping[str, np.float32]], seconds: Mapping[str, float]
    ) -> None:
        """Writes the numbers of the next line to a file, which the resumed run reads: `unreported`.

        Args:
          step: the last step of this process.
          metrics: the metrics of each step since the last line.
          seconds: the seconds since the last line, by `PARTS`.
        """
        numbers = [finite({name: float(value) for name, value in of_step.items()}) for of_step in metrics]
        content = {"metrics": numbers, "wall": self._with_carried(seconds)}
        write_whole(self._workdir / UNREPORTED.format(step), json.dumps(content) + "\n")

    def unreported(self, step: int) -> list[Mapping[str, np.float32]]:
        """Returns the metrics that `keep_unreported` wrote for this step; none if it wrote none. Call this once."""
        path = self._workdir / UNREPORTED.format(step)
        kept: _Unreported = {"metrics": [], "wall": {}}
        try:
            if path.exists():
                kept = read_json(path, _Unreported)
        except UserError as error:
            print(f"{error}; the run continues without it", flush=True)
            return []
        for part in PARTS:
            self._carried[part] += kept["wall"].get(part, 0.0)
        return [
            {name: np.float32(np.nan if value is None else value) for name, value in metrics.items()}
            for metrics in kept["metrics"]
        ]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes metrics of a step, unless an earlier process has written them."""
        if all((step, name) in self._written for name in metrics):
            return
        for tracker in self._trackers:
            tracker.write(step, metrics)

    def flush(self) -> None:
        """Stores all numbers, so that a resumed run can read them."""
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Closes the trackers."""
        for tracker in self._trackers:
            tracker.close()


class Progress:
    """Shows the progress of a run: a progress bar if stdout is a terminal, and lines otherwise.

    Prints a line after the first step, at each call of `report`, and at the times of `Pace`. No method reads arrays of
    the devices.
    """

    def __init__(self, total_steps: int, start_step: int, flops: Callable[[int, int], int], names_budget: bool = False):
        """Opens the progress bar.

        Args:
          total_steps: the number of steps of the run.
          start_step: the number of steps that earlier processes have done.
          flops: (start, stop) -> the FLOPs of steps `start` to `stop - 1`, to estimate the time left.
          names_budget: prints once how to shorten a run that would take more than a day.
        """
        self._total, self._flops, self._names_budget = total_steps, flops, names_budget
        self._pace, self._metrics, self._has_lines = Pace(), "", False
        self._started = self._marked = (start_step, 0.0)  # a step, and the seconds of training until its end
        self._bar: tqdm.tqdm | None = None
        if sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns:  # 0: unknown terminal size
            self._bar = tqdm.tqdm(
                total=total_steps,
                initial=start_step,
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} |{bar:12}| {desc}",
                file=sys.stdout,
            )

    def start(self, seconds: float) -> None:
        """Starts the clock of the steps when the first batch has been read. `seconds`: of training until now."""
        self._started = self._marked = (self._started[0], seconds)
        self._pace = Pace()

    def advance(self, done: int, seconds: float) -> None:
        """Counts a step, and prints a line if a line is due.

        Args:
          done: the last step that the devices have finished, up to `STEPS_IN_FLIGHT` before the step that has started.
          seconds: the seconds of training until now, by `Clocks.training`.
        """
        if self._bar is not None:
            self._bar.update()
        is_first, measured = not self._has_lines, seconds - self._started[1]
        if self._names_budget and done > self._started[0] and measured >= MEASURED_SECONDS * (1 + is_first):
            self._names_budget = False
            expected = self._seconds_left(self._started, done, seconds)
            if expected > DAY:
                print_line(
                    f"this run will take about {duration(expected)} on this machine; for a run of 8 hours, set "
                    f"--config.budget=8h and another --workdir"
                )
        before, then = self._marked
        if done > before and (is_first or self._pace.is_due()):
            if is_first:  # Later steps may be faster.
                self._show(done, "")
                self._started = (done, seconds)
            else:
                left = duration(self._seconds_left(self._marked, done, seconds))
                self._show(done, f"{(seconds - then) / (done - before):.2f} s a step {left} left")
            self._mark(done, seconds)

    def report(self, step: int, seconds: float, metrics: dict[str, float], seconds_left: float) -> None:
        """Prints the metrics of the steps since the last report."""
        self._metrics = describe(metrics)
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
        before, then = mark
        return (seconds - then) * self._flops(done, self._total) / self._flops(before, done)

    def close(self) -> None:
        """Closes the progress bar."""
        if self._bar is not None:
            self._bar.close()


def describe(metrics: dict[str, float]) -> str:
    """Formats `train/...` metrics as one line."""
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
