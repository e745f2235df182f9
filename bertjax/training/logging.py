"""Logs the metrics of a run: a progress bar or plain lines, TensorBoard, and metrics.jsonl."""

import collections
import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator

import tqdm
from etils import epath

from bertjax.files import write_whole

METRICS = "metrics.jsonl"
UPLOAD_SECONDS = 30  # between uploads of the whole file to an object store


def read_metrics(workdir: epath.PathLike) -> list[dict]:
    """Returns the lines of `metrics.jsonl`, without a last line that a crash cut off."""
    path = epath.Path(workdir) / METRICS
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


class _GrowingFile:
    """A file to append to. Object stores cannot append: there, the whole file is uploaded now and then."""

    def __init__(self, path: epath.Path, content: bytes = b""):
        self._path, self._content, self._is_remote = path, content, "://" in str(path)
        self._uploaded = time.monotonic()
        if not path.exists() or path.read_bytes() != content:
            write_whole(path, content)

    def write(self, more: bytes) -> None:
        self._content += more
        if not self._is_remote:
            with self._path.open("ab") as file:
                file.write(more)
        elif time.monotonic() - self._uploaded > UPLOAD_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._is_remote:
            write_whole(self._path, self._content)
            self._uploaded = time.monotonic()


class MetricsWriter:
    """Appends to `WORKDIR/metrics.jsonl` and to TensorBoard's `WORKDIR/tensorboard`.

    A resumed run first drops the lines after `start_step`, which it will write again. It does not write a line twice,
    such as that of an evaluation at `start_step`.
    """

    def __init__(self, workdir: epath.PathLike, start_step: int):
        # TensorBoard's own EventFileWriter imports TensorFlow, which takes seconds.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        workdir = epath.Path(workdir)
        kept = [line for line in read_metrics(workdir) if line["step"] <= start_step]
        self._lines = _GrowingFile(workdir / METRICS, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._there = {(line["step"], name) for line in kept for name in line}
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._events = _GrowingFile(workdir / "tensorboard" / name)
        self._records = RecordWriter(self._events)
        self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def write(self, step: int, metrics: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if all((step, name) in self._there for name in metrics):
            return
        # JSON has no NaN.
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.write((json.dumps({"step": step, **finite}) + "\n").encode())
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = Event(step=step, wall_time=time.time(), summary=Summary(value=values))
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Uploads all lines, so that a resumed run finds them."""
        self._lines.flush()
        self._events.flush()


class Clocks:
    """Measures where the wall time of this process goes: `data`, `checkpoints`, `evaluation`, and the rest, `steps`.

    Each is the time that the host spends there. While it waits for `data`, devices may still work on a few steps, so
    it is an upper bound of what reading costs. `checkpoints` is the time of copying the arrays to the host, and of
    waiting for an earlier write; the write itself runs in the background. `steps` is everything else: compiling and
    starting steps, and waiting for their results.
    """

    def __init__(self):
        self.total = collections.Counter()  # seconds until the last lap
        self._start_lap()

    def _start_lap(self) -> None:
        self._started, self._seconds = time.monotonic(), dict.fromkeys(("evaluation", "checkpoints", "data"), 0.0)

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Context manager: counts the time of its block as `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] += time.monotonic() - started

    def lap(self) -> dict[str, float]:
        """Returns the seconds by name since the last call, and adds them to `total`."""
        elapsed = time.monotonic() - self._started
        seconds = {"steps": elapsed - sum(self._seconds.values()), **self._seconds}
        self.total.update(seconds)
        self._start_lap()
        return seconds


def shares(group: str, seconds: dict[str, float]) -> dict[str, float]:
    """Returns the metrics `group/NAME`: each clock's share of all `seconds`."""
    return {f"{group}/{name}": value / sum(seconds.values()) for name, value in seconds.items()}


def describe_wall_time(seconds: dict[str, float]) -> str:
    """Formats "wall time: 93.1% steps, 4.2% evaluation, 0.9% checkpoints, 1.8% waiting for data"."""
    parts = [f"{value / sum(seconds.values()):.1%} {name}" for name, value in seconds.items()]
    return "wall time: " + ", ".join(parts).replace(" data", " waiting for data")


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
