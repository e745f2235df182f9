"""The base class of trackers that send metrics to a server: MLflow, Weights & Biases."""

import abc
import json
import math
import sys
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, TypedDict

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole
from bertjax.training.trackers.jsonl import METRICS, read_metrics


class _Sent(TypedDict):
    """WORKDIR/NAME.json: a run of the tracker, the last step that it has, and the names of the numbers of that."""

    run: str
    step: int
    names: list[str]


class StepMetrics(NamedTuple):
    """The numbers of a step by name; they may be NaN."""

    step: int
    metrics: Mapping[str, float]


class RemoteTracker(abc.ABC):
    """Sends numbers to a run of a tracker, in which a resumed run goes on; one that starts anew gets a new one.

    No tracker takes numbers back. So the steps that a resumed run makes again are not sent again; from the same
    checkpoint they have the same numbers. What the tracker lacks of earlier steps, such as those before it was named in
    the config, is taken from metrics.jsonl. Once a run is begun there, a tracker that fails does not stop training: it
    is tried again at each checkpoint.
    """

    name: ClassVar[str]  # in `config.sinks`
    package: ClassVar[str]

    def __init__(self, workdir: epath.Path, start_step: int, config):
        self._path, self._pending, self._fails = workdir / f"{self.name}.json", [], False
        self._sent: _Sent = {"run": "", "step": -1, "names": []}
        if start_step and self._path.exists():
            self._sent = read_json(self._path, _Sent, remedy="delete it to begin another run")
        self._there = self._sent["step"], frozenset(self._sent["names"])  # what earlier processes sent
        try:
            self._sent["run"] = self.open(known := self._sent["run"], workdir, config)
        except Exception as error:  # the network's, or the tracker's
            remedy = f"; to begin another run than {known}, delete {self._path}" if known else ""
            raise UserError(f"config.sinks = {self.name!r}: {_line(error)}{remedy}") from None
        for line in read_metrics(workdir):
            if (step := line.pop("step")) <= start_step:
                self.write(step, {name: math.nan if x is None else x for name, x in line.items()})

    @abc.abstractmethod
    def open(self, run: str, workdir: epath.Path, config) -> str:
        """Goes on in a run, or begins one if this is ""; returns its id."""

    @abc.abstractmethod
    def send(self, run: str, numbers: StepMetrics) -> None:
        """Adds numbers to the run."""

    @abc.abstractmethod
    def end(self, run: str, error: type[BaseException] | None) -> None:
        """Says that the process ends, and of which error."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        last, names = self._there
        is_new = step > last
        new = {name: float(x) for name, x in metrics.items() if is_new or (step == last and name not in names)}
        if new:
            self._pending.append(StepMetrics(step, new))
            if not self._fails:
                self._send()

    def flush(self) -> None:
        self._send()

    def close(self) -> None:
        self._fails, later = False, f"what it lacks is in {METRICS}, and is sent if the run goes on"
        self._send(later)
        try:
            self.end(self._sent["run"], sys.exc_info()[0])  # the run's, which closes its trackers whatever happens
        except Exception as error:
            self._tell(error, later)

    def _send(self, later: str = "training goes on, and it is tried again at each checkpoint") -> None:
        """Sends what is pending, or keeps it and says what happens later."""
        try:
            while self._pending:
                step, metrics = self._pending[0]
                self.send(self._sent["run"], self._pending[0])
                self._pending.pop(0)
                there = self._sent["names"] if step == self._sent["step"] else ()
                self._sent.update(step=step, names=sorted({*metrics, *there}))
                write_whole(self._path, json.dumps(self._sent) + "\n")
            self._fails = False
        except Exception as error:  # the network's, or the tracker's
            self._tell(error, later)

    def _tell(self, error: Exception, later: str) -> None:
        if not self._fails:
            print(f"{self.name}: {_line(error)}; {later}", flush=True)
        self._fails = True


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
