"""Lines about the phases and the progress of long work."""

import sys
import time
from collections.abc import Iterable
from typing import TextIO

import tqdm

# Seconds: the first minute; between two lines in the first minute; between two later lines.
EARLY, EVERY_EARLY, EVERY = 60, 9, 55


def phase(text: str, file: TextIO | None = None) -> None:
    """Prints the name of a phase when the phase begins, to stdout or to another file."""
    print(text, file=file, flush=True)


def print_line(text: str) -> None:
    """Prints a line to stdout, above a progress bar if there is one."""
    if sys.stdout.isatty():
        tqdm.tqdm.write(text, file=sys.stdout)
    else:
        print(text, flush=True)


class Pace:
    """The times of printed lines: at least every 10 seconds in the first minute, and then every minute."""

    def __init__(self) -> None:
        self._began = self._printed = time.monotonic()

    def is_due(self) -> bool:
        """Returns whether to print a line now."""
        now = time.monotonic()
        return now - self._printed >= (EVERY_EARLY if now - self._began < EARLY else EVERY)

    def printed(self) -> None:
        """Stores the time of a printed line."""
        self._printed = time.monotonic()


class Bar:
    """A progress bar if stdout is a terminal, and otherwise lines at the times of `Pace`.

    Args:
      title: the name of the work.
      sizes: the sizes of the parts of the work. If the sum is 0, the size is unknown.
      unit: the unit of the sizes; "B" for bytes.
    """

    def __init__(self, title: str, sizes: Iterable[int], unit: str = "B") -> None:
        self.n, self._title, self._total, self._unit = 0, title, sum(sizes), unit
        self._began, self._pace = time.monotonic(), Pace()
        options = dict(unit=unit, unit_scale=unit == "B", disable=None, leave=False, file=sys.stdout)
        self._bar = tqdm.tqdm(desc=title, total=self._total or None, **options)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, more: int = 1) -> None:
        """Adds finished work."""
        self.n += more
        self._bar.update(more)
        if self._bar.disable and self._pace.is_due():
            self._pace.printed()
            print(f"{self._title}: {self._progress()}", flush=True)

    def _progress(self) -> str:
        done, total = map(self._amount, (self.n, self._total))
        elapsed = time.monotonic() - self._began
        if not self.n:  # the first part is unfinished
            return f"{duration(elapsed)} so far"
        if not 0 < self.n <= self._total:
            return f"{done} in {duration(elapsed)}"
        left = elapsed * (self._total / self.n - 1)
        return f"{done} of {total}, {duration(left)} left"

    def _amount(self, count: int) -> str:
        return describe_bytes(count) if self._unit == "B" else f"{count:,}{self._unit}"


def describe_bytes(count: float) -> str:
    """Formats as "3.0 MB"."""
    factor, unit = next(((f, u) for f, u in ((1e9, "GB"), (1e6, "MB")) if count >= f), (1e3, "kB"))
    return f"{count / factor:,.1f} {unit}"


def duration(seconds: float) -> str:
    """Formats as H:MM:SS, or as "3 days 4:05" if the time is a day or longer."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} day{'s' * (days > 1)} {hours}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}"
