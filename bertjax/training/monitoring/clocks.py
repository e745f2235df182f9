"""Where the wall time of a run goes."""

import contextlib
import time
from collections.abc import Iterator, Mapping

PARTS = ("steps", "evaluation", "checkpoints", "data", "compile", "start", "restart")
TITLES = {"data": "waiting for data", "compile": "compiling", "start": "start-up"}
WITHIN_STEPS = ("devices",)  # what steps wait for, besides data and checkpoints


class Clocks:
    """Measures where the wall time of this process goes, by `PARTS`. Each is the time that the host spends there.

    `data`: waiting for batches; devices may still work on a few steps, so it is an upper bound of what reading costs.
    `checkpoints`: copying the arrays to the host, and waiting for an earlier write; the write itself runs in the
    background. `compile`: calling the step for the first time with batches of a shape. `start`: from `began` to the
    first step, without the other parts; `restart` is the same in a process that resumes the run. `steps`: the rest:
    starting steps, and waiting for their results.
    """

    def __init__(self, began: float | None = None):
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
        """Counts the time until now, as far as it has no name, as `start`, or as `restart` if the run is resumed."""
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
        """Returns the seconds since the last call by what the host waited for; the rest as `others`."""
        elapsed, spent, self._step = self._since(self._step)
        return {**spent, "others": elapsed - sum(spent.values())}

    def _since(self, mark):
        now, (then, before) = time.monotonic(), mark
        return now - then, {name: self._spent[name] - before[name] for name in before}, (now, dict(self._spent))


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns each part's share of all seconds."""
    return {name: seconds[name] / sum(seconds.values()) for name in PARTS}


def describe_wall(seconds: Mapping[str, float]) -> str:
    """Formats "wall time: 83.1% steps, 4.2% evaluation, ..., 3.1% start-up"; with "restart" only after a restart."""
    found = {name: share for name, share in shares(seconds).items() if share or name != "restart"}
    return "wall time: " + ", ".join(f"{share:.1%} {TITLES.get(name, name)}" for name, share in found.items())
