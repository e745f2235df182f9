"""The Weights & Biases tracker.

The environment variable WANDB_PROJECT names the project. With WANDB_MODE=offline, `wandb sync` sends the files later.
"""

import os

from etils import epath
from ml_collections import ConfigDict

from bertjax.training.trackers.remote import RemoteTracker, StepMetrics

PROJECT = "bertjax"
KILLED, FAILED = 255, 1  # exit codes that Weights & Biases displays as killed and failed


class WandB(RemoteTracker):
    """Sends the config and the metrics. Writes local files to WORKDIR/wandb."""

    name = package = "wandb"

    def open(self, run_id: str, workdir: epath.Path, config: ConfigDict) -> str:
        """Resumes or creates a run of Weights & Biases; see `RemoteTracker.open`."""
        import wandb

        self._wandb_run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id or None,
            resume="allow" if run_id else None,
            name=workdir.name,
            dir=None if "://" in str(workdir) else str(workdir),
            config=config.to_dict(),
            settings=wandb.Settings(console="off"),  # do not capture the output of the terminal
        )
        return self._wandb_run.id

    def send(self, run_id: str, step_metrics: StepMetrics) -> None:
        """Logs the metrics of a step."""
        del run_id
        self._wandb_run.log(dict(step_metrics.metrics), step=step_metrics.step)

    def end(self, run_id: str, error: type[BaseException] | None) -> None:
        """Finishes the run with an exit code."""
        del run_id
        self._wandb_run.finish(0 if error is None else KILLED if issubclass(error, KeyboardInterrupt) else FAILED)
