"""Logs the metrics of a run: on the terminal, a progress bar or plain lines, and to its sinks."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np
import tqdm
from etils import epath

from bertjax.config import UserError
from bertjax.files import read_json, write_whole
from bertjax.training.clocks import PARTS, shares
from bertjax.training.sinks import SINKS, named
from bertjax.training.sinks.jsonl import JsonLines, finite, read_metrics

UNREPORTED = "unreported_metrics_{}.json"


class _Unreported(TypedDict):
    metrics: list[dict[str, float | None]]
    wall: dict[str, float]


class MetricsWriter:
    """Writes metrics, and the seconds that they took, to the sinks of a run.

    A resumed run does not write anything twice, such as the evaluation at `start_step`.

    Attributes:
      wall: seconds of all processes of the run so far, by `PARTS`.
    """

    def __init__(self, workdir: epath.PathLike, start_step: int, config):
        workdir = self._workdir = epath.Path(workdir)
        lines = read_metrics(workdir)
        kept = [line for line in lines if line["step"] <= start_step]
        self.wall, self._carried = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
        for line in lines:
            for part in PARTS:
                seconds = line.get(f"wall/{part}") or 0.0
                if line["step"] <= start_step:
                    self.wall[part] += seconds
                else:  # this work is done again
                    self._carried["restart"] += seconds
        for path in workdir.glob(UNREPORTED.format("*")):
            if path.name != UNREPORTED.format(start_step):
                path.unlink(missing_ok=True)
        self._there = {(line["step"], name) for line in kept for name in line}
        makers = (JsonLines, *map(SINKS.get, named(config)))
        self._sinks = [make(workdir, start_step, config) for make in makers]

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
        """Adds what earlier processes spent and no line has."""
        return {part: seconds[part] + self._carried[part] for part in PARTS}

    def keep_unreported(self, step: int, metrics: Sequence[Mapping[str, float]], seconds: Mapping[str, float]) -> None:
        """Keeps what belongs to the next line, which a resumed run will write: metrics of each step, and seconds."""
        content = {"metrics": [finite(each) for each in metrics], "wall": self._with_carried(seconds)}
        write_whole(self._workdir / UNREPORTED.format(step), json.dumps(content) + "\n")

    def unreported(self, step: int) -> list[dict[str, np.float32]]:
        """Returns the metrics of `keep_unreported`, if it was called for this step; none otherwise. Call this once."""
        path = self._workdir / UNREPORTED.format(step)
        try:
            kept = read_json(path, _Unreported) if path.exists() else {"metrics": [], "wall": {}}
        except UserError as error:
            print(f"{error}; going on without", flush=True)
            return []
        for part in PARTS:
            self._carried[part] += kept["wall"].get(part, 0.0)
        return [
            {name: np.float32(np.nan if value is None else value) for name, value in metrics.items()}
            for metrics in kept["metrics"]
        ]

    def write(self, step: int, metrics: dict[str, float]) -> None:
        if all((step, name) in self._there for name in metrics):
            return
        for sink in self._sinks:
            sink.write(step, metrics)

    def flush(self) -> None:
        """Stores all that was written, so that a resumed run finds it."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class Progress:
    """A progress bar on a terminal; elsewhere, one line per call of `report`."""

    def __init__(self, total_steps: int, start_step: int):
        self._total = total_steps
        self._bar = None
        if sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns:  # 0: unknown terminal size
            self._bar = tqdm.tqdm(
                total=total_steps,
                initial=start_step,
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} |{bar:12}| {desc}",
            )

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def report(self, step: int, metrics: dict[str, float], seconds_left: float) -> None:
        text = describe(metrics, seconds_left)
        if self._bar is not None:
            self._bar.set_description_str(text)
        else:
            print(f"step {step}/{self._total} {text}", flush=True)

    def say(self, text: str) -> None:
        """Prints a line, above the bar."""
        tqdm.tqdm.write(text) if self._bar is not None else print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def describe(metrics: dict[str, float], seconds_left: float) -> str:
    """Formats `train/...` metrics as one line."""
    parts = []
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
    return " ".join([*parts, duration(seconds_left), "left"])


def duration(seconds: float) -> str:
    """Formats as H:MM:SS, or M:SS below an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
