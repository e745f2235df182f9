"""Weights & Biases, in the project that WANDB_PROJECT names; WANDB_MODE=offline writes to files for `wandb sync`."""

import os

from etils import epath

from bertjax.training.trackers.remote import RemoteTracker, StepMetrics

PROJECT = "bertjax"
KILLED, FAILED = 255, 1  # exit codes that it shows as such


class WandB(RemoteTracker):
    """A run has the config, and metrics by their names. Its files are in WORKDIR/wandb."""

    name = package = "wandb"

    def open(self, run: str, workdir: epath.Path, config) -> str:
        import wandb

        self._wandb_run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run or None,
            resume="allow" if run else None,
            name=workdir.name,
            dir=None if "://" in str(workdir) else str(workdir),
            config=config.to_dict(),
            settings=wandb.Settings(console="off"),  # the terminal's output stays as it is
        )
        return self._wandb_run.id

    def send(self, run: str, numbers: StepMetrics) -> None:
        del run
        self._wandb_run.log(numbers.metrics, step=numbers.step)

    def end(self, run: str, error: type[BaseException] | None) -> None:
        del run
        self._wandb_run.finish(0 if error is None else KILLED if issubclass(error, KeyboardInterrupt) else FAILED)
