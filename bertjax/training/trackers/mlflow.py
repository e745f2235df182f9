"""MLflow: MLFLOW_TRACKING_URI is the address of the server, MLFLOW_EXPERIMENT_NAME the name of the experiment."""

import os
import re
import time
from collections.abc import Iterator, Mapping

from etils import epath
from ml_collections import ConfigDict

from bertjax.training.trackers.remote import RemoteTracker, StepMetrics

EXPERIMENT = "bertjax"
MAX_PARAMS_PER_CALL, MAX_PARAM_LENGTH = 100, 500  # limits of MLflow


class MLflow(RemoteTracker):
    """Sends the fields of the config as params. `_` replaces characters that MLflow rejects in the names of metrics."""

    name = package = "mlflow"

    def open(self, run: str, workdir: epath.Path, config: ConfigDict) -> str:
        """Resumes or creates a run of MLflow; see `RemoteTracker.open`."""
        for setting, value in (("MAX_RETRIES", "2"), ("TIMEOUT", "10")):  # the defaults are minutes, and training waits
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{setting}", value)
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient()
        if run:
            self._client.update_run(run, status="RUNNING")
            return run
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(experiment_id, run_name=workdir.name, tags={"workdir": str(workdir)}).info.run_id
        params = [Param(field, str(value)[:MAX_PARAM_LENGTH]) for field, value in _fields("", config.to_dict())]
        for first in range(0, len(params), MAX_PARAMS_PER_CALL):
            self._client.log_batch(run, params=params[first : first + MAX_PARAMS_PER_CALL])
        return run

    def send(self, run: str, numbers: StepMetrics) -> None:
        """Logs the metrics of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = {re.sub(r"[^\w./ :-]", "_", name): value for name, value in numbers.metrics.items()}
        self._client.log_batch(run, [Metric(name, value, now, numbers.step) for name, value in metrics.items()])

    def end(self, run: str, error: type[BaseException] | None) -> None:
        """Sets the final status of the run."""
        status = "FINISHED" if error is None else "KILLED" if issubclass(error, KeyboardInterrupt) else "FAILED"
        self._client.set_terminated(run, status)


def _fields(section: str, content: Mapping) -> Iterator[tuple[str, object]]:
    """Yields the fields of a config by dotted name."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _fields(f"{section}{name}.", value)
        else:
            yield f"{section}{name}", value
