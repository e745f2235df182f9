"""Weights & Biases: WANDB_PROJECT names the project; WANDB_MODE=offline writes files for `wandb sync`."""

import os

from etils import epath
from ml_collections import ConfigDict

from bertjax.training.trackers.remote import RemoteTracker, StepMetrics

PROJECT = "bertjax"
KILLED, FAILED = 255, 1  # exit codes that Weights & Biases shows as killed and failed


class WandB(RemoteTracker):
    """Sends the config and the metrics. Local files are in WORKDIR/wandb."""

    name = package = "wandb"

    def open(self, run: str, workdir: epath.Path, config: ConfigDict) -> str:
        """Resumes or creates a run of Weights & Biases; see `RemoteTracker.open`."""
        import wandb

        self._wandb_run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run or None,
            resume="allow" if run else None,
            name=workdir.name,
            dir=None if "://" in str(workdir) else str(workdir),
            config=config.to_dict(),
            settings=wandb.Settings(console="off"),  # does not capture the output of the terminal
        )
        return self._wandb_run.id

    def send(self, run: str, numbers: StepMetrics) -> None:
        """Logs the metrics of a step."""
        del run
        self._wandb_run.log(numbers.metrics, step=numbers.step)

    def end(self, run: str, error: type[BaseException] | None) -> None:
        """Finishes the run with an exit code."""
        del run
        self._wandb_run.finish(0 if error is None else KILLED if issubclass(error, KeyboardInterrupt) else FAILED)
