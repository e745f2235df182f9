"""Measures the wall time of the parts of a run."""

import contextlib
import time
from collections.abc import Iterator, Mapping

PARTS = ("steps", "evaluation", "checkpoints", "data", "compile", "start", "restart")
TITLES = {  # names of parts in the report, if they differ from `PARTS`
    "data": "waiting for data",
    "compile": "compiling",
    "start": "start-up",
}
WITHIN_STEPS = ("devices",)  # activities that are measured separately, and that belong to the part "steps"

_Mark = tuple[float, dict[str, float]]  # a time, and the measured seconds until this time by name


class Clocks:
    """Measures the wall time that the host of this process spends in each of `PARTS`.

    - `data`: waiting for batches. The devices may still run a few steps meanwhile, so that this is an upper bound of
      their idle time.
    - `checkpoints`: copying the arrays to the host, and waiting for an earlier write. The write itself runs in the
      background.
    - `compile`: calling the step for the first time with batches of a shape.
    - `evaluation`: evaluating the model.
    - `start`: the time until the first batch is read, without the time of the other parts. In a process that resumes
      the run, this time counts as `restart` instead.
    - `steps`: the remaining time, which is dispatching steps, waiting for the devices, and hooks.
    """

    def __init__(self, start_time: float | None = None):
        """Starts the clocks.

        Args:
          start_time: the start of the process, in seconds of `time.monotonic`; None for now.
        """
        self._start_time = start_time = time.monotonic() if start_time is None else start_time
        self._spent = dict.fromkeys((*PARTS[1:], *WITHIN_STEPS), 0.0)
        self._lap = self._step = (start_time, dict(self._spent))

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Context manager: adds the time of the block to `name`, a part or an activity of `WITHIN_STEPS`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._spent[name] += time.monotonic() - started

    def end_startup(self, is_resumed: bool = False) -> None:
        """Ends the part `start` (`restart` if the run is resumed): the time until now without the other parts."""
        lap_start, before = self._lap
        self._spent["restart" if is_resumed else "start"] += (
            time.monotonic() - lap_start - sum(self._spent.values()) + sum(before.values())
        )
        self.step_seconds()

    def training_seconds(self) -> float:
        """Returns the seconds of the parts `steps` and `data` until now."""
        return time.monotonic() - self._start_time - sum(self._spent[part] for part in PARTS[1:] if part != "data")

    def lap_seconds(self) -> dict[str, float]:
        """Returns the seconds of each of `PARTS` since the last call of this method."""
        elapsed, spent, self._lap = self._since(self._lap)
        return {"steps": elapsed - sum(spent[name] for name in PARTS[1:])} | {name: spent[name] for name in PARTS[1:]}

    def step_seconds(self) -> dict[str, float]:
        """Returns {name: seconds} since the last call of this method; `others` is the time that no name measured."""
        elapsed, spent, self._step = self._since(self._step)
        return {**spent, "others": elapsed - sum(spent.values())}

    def _since(self, mark: _Mark) -> tuple[float, dict[str, float], _Mark]:
        """Returns the seconds since a mark, the measured seconds since the mark by name, and a new mark."""
        now, (marked_time, before) = time.monotonic(), mark
        return now - marked_time, {name: self._spent[name] - before[name] for name in before}, (now, dict(self._spent))


def time_shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of each part in the total time, from 0 to 1."""
    return {name: seconds[name] / sum(seconds.values()) for name in PARTS}


def format_wall_time(seconds: Mapping[str, float]) -> str:
    """Formats the shares: "wall time: 83.1% steps, 4.2% evaluation, ...". Omits "restart" if it is 0."""
    shown = {name: share for name, share in time_shares(seconds).items() if share or name != "restart"}
    return "wall time: " + ", ".join(f"{share:.1%} {TITLES.get(name, name)}" for name, share in shown.items())
