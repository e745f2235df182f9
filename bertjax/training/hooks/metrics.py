"""Prints the metrics of a run, and writes them to the trackers."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from bertjax.distributed.topology import peak_flops
from bertjax.distributed.transfers import STEPS_IN_FLIGHT
from bertjax.training.hooks.divergence import finite_steps
from bertjax.training.hooks.hook import Hook, TrainingRun
from bertjax.training.monitoring.clocks import format_wall_time
from bertjax.training.monitoring.logging import MetricsWriter, Progress
from bertjax.training.scores import Scores


class ReportMetrics(Hook):
    """Reports the means of the metrics every `config.log_every_steps` steps and before each checkpoint.

    All hosts copy the metrics of all steps to the host and call `Hook.on_metrics`. The first host prints and writes the
    means.
    """

    _writer: MetricsWriter | None = None  # only on the first host
    _progress: Progress | None = None  # only on the first host

    def on_start(self, run: TrainingRun) -> None:
        """Opens the trackers and the progress bar."""
        self._pending: list[Mapping[str, jax.Array]] = []  # metrics since the last report, still on the devices
        # Metrics of the last steps of an earlier process, which stopped between two reports.
        self._unreported: list[Mapping[str, np.float32]] = []
        self._sequences = 0  # number of sequences since the last report
        if run.is_first_host:
            self._writer = MetricsWriter(run.workdir, run.start_step, run.config)
            is_new = run.start_step == 0 and not run.config.get("budget")
            self._progress = Progress(run.total_steps, run.start_step, run.task.flops, suggests_budget=is_new)
            self._unreported = self._writer.read_unreported(run.start_step)

    def on_batch(self, run: TrainingRun, batch: Mapping[str, jax.Array]) -> None:
        """Starts the clock of the steps when the first batch has been read."""
        del batch
        if self._progress and run.step == run.start_step + 1:
            self._progress.start(run.clocks.training_seconds())

    def on_step(self, run: TrainingRun, metrics: Mapping[str, jax.Array]) -> None:
        """Reports the steps since the last report if a report or a checkpoint is due.

        If a signal stops the run between two reports, stores the metrics for the resumed run.
        """
        self._pending.append(metrics)
        self._sequences += run.step_config.batch_size
        if run.is_save_due or run.step % run.config.log_every_steps == 0:
            self._report(run)
        elif run.is_stopping:
            self._unreported += self._fetch(run)
            if self._writer:
                self._writer.write_unreported(run.step, self._unreported, run.clocks.lap_seconds())
        if self._progress:
            in_flight = 0 if run.step == run.start_step + 1 else STEPS_IN_FLIGHT
            self._progress.advance(run.step - min(len(self._pending), in_flight), run.clocks.training_seconds())

    def _report(self, run: TrainingRun) -> None:
        """Prints and writes the means of the metrics, and the throughput, since the last report."""
        fetched, seconds = self._fetch(run), run.clocks.lap_seconds()
        steps = finite_steps([*self._unreported, *fetched], add_skipped=run.config.optimizer.skip_nonfinite > 0)
        self._unreported = []
        means = {f"train/{name}": float(np.mean([metrics[name] for metrics in steps])) for name in steps[0]}
        tokens, padding = means.pop("train/tokens"), means.pop("train/padding")
        training = seconds["steps"] + seconds["data"]
        flops_per_second = run.task.flops(run.step - len(fetched), run.step) / training
        means["train/learning_rate"] = float(run.schedule(run.step - 1))
        means["train/sequences_per_second"] = self._sequences / training
        self._sequences = 0
        means["train/tokens_per_second"] = tokens * len(fetched) / training
        means["train/tokens_per_step"] = tokens
        means["train/real_tokens_share"] = tokens / (tokens + padding)
        if peak := peak_flops(run.mesh.devices.flat[0]):
            means["train/mfu"] = flops_per_second / (peak * run.mesh.size)
        if self._writer and self._progress:
            self._writer.write_with_wall_time(run.step, seconds, means)
            seconds_left = run.task.flops(run.step, run.total_steps) / flops_per_second
            self._progress.report(run.step, run.clocks.training_seconds(), means, seconds_left)

    def _fetch(self, run: TrainingRun) -> list[Mapping[str, np.float32]]:
        """Copies the metrics of the pending steps to the host. The current step is the last pending step."""
        with run.clocks.measure("devices"):
            fetched = jax.device_get(self._pending)
        self._pending = []
        for hook in run.hooks:
            hook.on_metrics(run, dict(enumerate(fetched, run.step - len(fetched) + 1)))
        return fetched

    def on_save(self, run: TrainingRun) -> None:
        """Flushes the trackers, so that a run that resumes from the checkpoint can read the metrics."""
        if self._writer:
            self._writer.flush()

    def on_evaluation(self, run: TrainingRun, scores: Scores) -> None:
        """Prints and writes the scores."""
        if self._writer:
            values: dict[str, Any] = {**scores.scores, **scores.decided}
            self._writer.write(run.step, {f"eval/{name}": value for name, value in values.items()})
            run.print(f"step {run.step} eval: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Closes the progress bar and the trackers. Prints the shares of the wall time unless an error ends the run."""
        if self._writer and self._progress:
            self._progress.close()
            if error is None:
                self._writer.write_last(run.step, run.clocks.lap_seconds())
            self._writer.close()
            if error is None:
                print(format_wall_time(self._writer.wall_seconds), flush=True)
