"""The base class of trackers that send metrics to a server: MLflow, Weights & Biases."""

import abc
import json
import math
import sys
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, TypedDict

from etils import epath
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.common.files import read_json, write_whole
from bertjax.training.trackers.jsonl import METRICS, read_metrics


class _Sent(TypedDict):
    """The content of WORKDIR/NAME.json.

    Attributes:
      run: the id of the run in the tracker.
      step: the last step whose metrics were sent; -1 for none.
      names: the names of the metrics of this step that were sent.
    """

    run: str
    step: int
    names: list[str]


class StepMetrics(NamedTuple):
    """The metrics of a step, by name. Values may be NaN."""

    step: int
    metrics: Mapping[str, float]


class RemoteTracker(abc.ABC):
    """Sends the metrics of a training run to one run of a tracker. A resumed training run continues the tracker's run.

    Trackers cannot delete metrics. If a resumed run repeats a step, the metrics of this step are therefore not sent
    again. The repeated step gives the same metrics, because the run resumes from the same checkpoint. If the metrics of
    earlier steps were not sent, for example because the tracker was added to `config.sinks` later, they are read from
    metrics.jsonl.

    `open` must succeed at the start. Later errors do not stop training: the tracker tries to send the metrics again at
    each checkpoint.

    Attributes:
      name: the name of the tracker in `config.sinks`.
      package: the Python package that the tracker needs.
    """

    name: ClassVar[str]
    package: ClassVar[str]

    def __init__(self, workdir: epath.Path, start_step: int, config: ConfigDict):
        """Opens a run of the tracker, and sends the missing metrics up to `start_step`.

        Args:
          workdir: the workdir of the run.
          start_step: the number of finished steps; 0 for a new run.
          config: the config of the run.

        Raises:
          UserError: `open` fails.
        """
        self._path = workdir / f"{self.name}.json"
        self._pending: list[StepMetrics] = []
        self._has_failed = False
        self._sent: _Sent = {"run": "", "step": -1, "names": []}
        if start_step and self._path.exists():
            self._sent = read_json(self._path, _Sent, remedy="delete it to start a new run")
        # The last step that earlier processes sent, and the names of the metrics of this step.
        self._sent_before = self._sent["step"], frozenset(self._sent["names"])
        earlier_run = self._sent["run"]
        try:
            self._sent["run"] = self.open(earlier_run, workdir, config)
        except Exception as error:  # trackers raise errors of any type
            remedy = f"; to start a new run instead of {earlier_run}, delete {self._path}" if earlier_run else ""
            raise UserError(f"config.sinks = {self.name!r}: {_in_one_line(error)}{remedy}") from None
        for line in read_metrics(workdir):
            if (step := line.pop("step")) <= start_step:
                self.write(step, {name: math.nan if x is None else x for name, x in line.items()})

    @abc.abstractmethod
    def open(self, run_id: str, workdir: epath.Path, config: ConfigDict) -> str:
        """Starts or resumes a run of the tracker, and returns the id of the run.

        Args:
          run_id: the id of the run to resume; "" starts a new run.
          workdir: the workdir of the training run.
          config: the config of the training run.
        """

    @abc.abstractmethod
    def send(self, run_id: str, step_metrics: StepMetrics) -> None:
        """Sends the metrics of a step to the tracker's run."""

    @abc.abstractmethod
    def end(self, run_id: str, error: type[BaseException] | None) -> None:
        """Marks the tracker's run as finished, or as failed.

        Args:
          run_id: the id of the run.
          error: the type of the exception that ended training; None if training has finished.
        """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step that were not sent before."""
        last_step, names = self._sent_before
        is_new = step > last_step
        new = {name: float(x) for name, x in metrics.items() if is_new or (step == last_step and name not in names)}
        if new:
            self._pending.append(StepMetrics(step, new))
            if not self._has_failed:
                self._send_pending()

    def flush(self) -> None:
        """Sends the pending metrics."""
        self._send_pending()

    def close(self) -> None:
        """Sends the pending metrics and ends the tracker's run."""
        self._has_failed = False
        consequence = f"the missing metrics are in {METRICS}, and are sent when the run resumes"
        self._send_pending(consequence)
        try:
            # After an error, the training loop closes the trackers while it handles the exception.
            self.end(self._sent["run"], sys.exc_info()[0])
        except Exception as error:
            self._print_error(error, consequence)

    def _send_pending(self, consequence: str = "training continues; metrics are sent again at each checkpoint") -> None:
        """Sends the pending metrics. After an error, keeps the metrics and prints the error and the consequence."""
        try:
            while self._pending:
                step, metrics = self._pending[0]
                self.send(self._sent["run"], self._pending[0])
                self._pending.pop(0)
                names_of_step = self._sent["names"] if step == self._sent["step"] else ()
                self._sent["step"], self._sent["names"] = step, sorted({*metrics, *names_of_step})
                write_whole(self._path, json.dumps(self._sent) + "\n")
            self._has_failed = False
        except Exception as error:  # trackers raise errors of any type
            self._print_error(error, consequence)

    def _print_error(self, error: Exception, consequence: str) -> None:
        """Prints an error, unless the previous call to the tracker also failed."""
        if not self._has_failed:
            print(f"{self.name}: {_in_one_line(error)}; {consequence}", flush=True)
        self._has_failed = True


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
