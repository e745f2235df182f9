"""MLflow, where MLFLOW_TRACKING_URI says, in the experiment that MLFLOW_EXPERIMENT_NAME names."""

import os
import re
import time
from collections.abc import Iterator, Mapping

from etils import epath

from bertjax.training.trackers.remote import RemoteTracker, StepMetrics

EXPERIMENT = "bertjax"
PARAMS_AT_ONCE, LONGEST_PARAM = 100, 500  # MLflow's limits


class MLflow(RemoteTracker):
    """A run has the fields of the config as params, and metrics by their names, with `_` for what these cannot have."""

    name = package = "mlflow"

    def open(self, run: str, workdir: epath.Path, config) -> str:
        for setting, value in (("MAX_RETRIES", "2"), ("TIMEOUT", "10")):  # its own are minutes, in which a run waits
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{setting}", value)
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient()
        if run:
            self._client.update_run(run, status="RUNNING")
            return run
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(number, run_name=workdir.name, tags={"workdir": str(workdir)}).info.run_id
        params = [Param(field, str(value)[:LONGEST_PARAM]) for field, value in _fields("", config.to_dict())]
        for first in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(run, params=params[first : first + PARAMS_AT_ONCE])
        return run

    def send(self, run: str, numbers: StepMetrics) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w./ :-]", "_", name): value for name, value in numbers.metrics.items()}
        self._client.log_batch(run, [Metric(name, value, now, numbers.step) for name, value in named.items()])

    def end(self, run: str, error: type[BaseException] | None) -> None:
        status = "FINISHED" if error is None else "KILLED" if issubclass(error, KeyboardInterrupt) else "FAILED"
        self._client.set_terminated(run, status)


def _fields(section: str, content: Mapping) -> Iterator[tuple[str, object]]:
    """Yields the fields of a config by dotted name."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _fields(f"{section}{name}.", value)
        else:
            yield f"{section}{name}", value
