"""Measures the parts of the wall time of a run."""

import contextlib
import time
from collections.abc import Iterator, Mapping

PARTS = ("steps", "evaluation", "checkpoints", "data", "compile", "start", "restart")
TITLES = {"data": "waiting for data", "compile": "compiling", "start": "start-up"}
WITHIN_STEPS = ("devices",)  # causes of waiting that belong to the part "steps"

_Mark = tuple[float, dict[str, float]]  # a time, and the seconds until then by name


class Clocks:
    """Measures the wall time of this process by `PARTS`. Each part is the time that the host spends in it.

    - `data`: waiting for batches. The devices may still run a few steps, so that this is an upper bound of the time
      that reading costs.
    - `checkpoints`: copying the arrays to the host, and waiting for an earlier write. The write itself runs in the
      background.
    - `compile`: calling the step for the first time with batches of a shape.
    - `evaluation`: evaluating the model.
    - `start`: from the start of the process to the first step, without the other parts; `restart` in a process that
      resumes the run.
    - `steps`: the rest, which is starting steps and waiting for their results.
    """

    def __init__(self, began: float | None = None):
        """Starts the clocks.

        Args:
          began: when the process began, by `time.monotonic`; None: now.
        """
        self._began = began = time.monotonic() if began is None else began
        self._spent = dict.fromkeys((*PARTS[1:], *WITHIN_STEPS), 0.0)
        self._lap = self._step = (began, dict(self._spent))

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Context manager: counts the time of its block as `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._spent[name] += time.monotonic() - started

    def start_steps(self, resumes: bool = False) -> None:
        """Counts the time until now that belongs to no other part as `start`, or as `restart` if the run is resumed."""
        began, before = self._lap
        self._spent["restart" if resumes else "start"] += (
            time.monotonic() - began - sum(self._spent.values()) + sum(before.values())
        )
        self.step()

    def training(self) -> float:
        """Returns the seconds until now of steps and of waiting for their data."""
        return time.monotonic() - self._began - sum(self._spent[part] for part in PARTS[1:] if part != "data")

    def lap(self) -> dict[str, float]:
        """Returns the seconds since the last call, by `PARTS`."""
        elapsed, spent, self._lap = self._since(self._lap)
        return {"steps": elapsed - sum(spent[name] for name in PARTS[1:])} | {name: spent[name] for name in PARTS[1:]}

    def step(self) -> dict[str, float]:
        """Returns the seconds since the last call by the cause of waiting; the rest as `others`."""
        elapsed, spent, self._step = self._since(self._step)
        return {**spent, "others": elapsed - sum(spent.values())}

    def _since(self, mark: _Mark) -> tuple[float, dict[str, float], _Mark]:
        """Returns the seconds since a mark, the seconds since then by name, and a new mark."""
        now, (then, before) = time.monotonic(), mark
        return now - then, {name: self._spent[name] - before[name] for name in before}, (now, dict(self._spent))


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the share of each part in all seconds."""
    return {name: seconds[name] / sum(seconds.values()) for name in PARTS}


def describe_wall(seconds: Mapping[str, float]) -> str:
    """Formats "wall time: 83.1% steps, 4.2% evaluation, ..., 3.1% start-up"; with "restart" only after a restart."""
    shown = {name: share for name, share in shares(seconds).items() if share or name != "restart"}
    return "wall time: " + ", ".join(f"{share:.1%} {TITLES.get(name, name)}" for name, share in shown.items())
