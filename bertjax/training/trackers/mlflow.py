"""The MLflow tracker. The environment variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME configure it."""

import os
import re
import time

from etils import epath
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bertjax.training.trackers.remote import RemoteTracker, StepMetrics

EXPERIMENT = "bertjax"
MAX_PARAMS_PER_CALL, MAX_PARAM_LENGTH = 100, 500  # limits of MLflow


class MLflow(RemoteTracker):
    """Sends the metrics, and the fields of the config as MLflow params.

    Replaces invalid characters in metric names by `_`.
    """

    name = package = "mlflow"

    def open(self, run_id: str, workdir: epath.Path, config: ConfigDict) -> str:
        """Resumes or creates a run of MLflow; see `RemoteTracker.open`."""
        for setting, value in (("MAX_RETRIES", "2"), ("TIMEOUT", "10")):  # otherwise, MLflow can block for minutes
            os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{setting}", value)
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient()
        if run_id:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run = self._client.create_run(experiment_id, run_name=workdir.name, tags={"workdir": str(workdir)})
        run_id = run.info.run_id
        fields = flatten_dict(config.to_dict(), sep=".")
        params = [Param(field, str(value)[:MAX_PARAM_LENGTH]) for field, value in fields.items()]
        for first in range(0, len(params), MAX_PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[first : first + MAX_PARAMS_PER_CALL])
        return run_id

    def send(self, run_id: str, step_metrics: StepMetrics) -> None:
        """Logs the metrics of a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = {re.sub(r"[^\w./ :-]", "_", name): value for name, value in step_metrics.metrics.items()}
        self._client.log_batch(run_id, [Metric(name, value, now, step_metrics.step) for name, value in metrics.items()])

    def end(self, run_id: str, error: type[BaseException] | None) -> None:
        """Sets the final status of the run."""
        status = "FINISHED" if error is None else "KILLED" if issubclass(error, KeyboardInterrupt) else "FAILED"
        self._client.set_terminated(run_id, status)
