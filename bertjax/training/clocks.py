"""Where the wall time of a run goes, and which of its steps stall."""

import collections
import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping

PARTS = ("steps", "evaluation", "checkpoints", "data", "compile", "restart")
WITHIN_STEPS = ("devices",)  # what steps wait for, besides data and checkpoints
STALL_SECONDS = 1.0  # what is shorter is no stall, however short the other steps are


class Clocks:
    """Measures where the wall time of this process goes, by `PARTS`. Each is the time that the host spends there.

    `data`: waiting for batches; devices may still work on a few steps, so it is an upper bound of what reading costs.
    `checkpoints`: copying the arrays to the host, and waiting for an earlier write; the write itself runs in the
    background. `compile`: calling the step for the first time with batches of a shape. `restart`: from `began` to the
    first step, but for these. `steps`: everything else: starting steps, and waiting for their results.
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

    def start_steps(self) -> None:
        """Counts the time until now, as far as it has no name, as `restart`."""
        began, before = self._lap
        self._spent["restart"] += time.monotonic() - began - sum(self._spent.values()) + sum(before.values())
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
    """Formats "wall time: 93.1% steps, 4.2% evaluation, 0.9% checkpoints, 1.8% waiting for data, ..."."""
    parts = [f"{share:.1%} {name}" for name, share in shares(seconds).items()]
    return "wall time: " + ", ".join(parts).replace(" data", " waiting for data")


class Watchdog:
    """Notices steps that take `factor` times as long as the median of the last 100; 0: none."""

    def __init__(self, factor: float):
        self._factor, self._recent = factor, collections.deque(maxlen=100)

    def check(self, waits: Mapping[str, float]) -> str:
        """Takes the result of `Clocks.step`; returns what to say of the step, "" if it was none too long.

        Neither evaluation nor compiling belongs to a step.
        """
        seconds = sum(waits.values()) - waits["evaluation"] - waits["compile"]
        median = statistics.median(self._recent) if len(self._recent) >= 10 else seconds
        self._recent.append(seconds)
        if not self._factor or seconds < max(self._factor * median, STALL_SECONDS):
            return ""
        devices = "devices or other hosts"
        named = dict(data="data", devices=devices, checkpoints="checkpoints", others="this host")
        parts = sorted(((waits[name], said) for name, said in named.items()), reverse=True)
        said = ", ".join(f"{name} {time:.1f} s" for time, name in parts if time > 0.1 * seconds)
        return f"took {seconds:.1f} s, {seconds / median:.0f} times the median, waiting for: {said}"
