"""Saves the checkpoints of a run."""

from collections.abc import Mapping

import jax

from bertjax.training import signals
from bertjax.training.hooks.divergence import Diverged
from bertjax.training.hooks.hook import Hook, TrainingRun


class SaveCheckpoints(Hook):
    """Saves every `config.checkpoint.every_steps` steps, before each evaluation, and when a signal stops the run."""

    def __init__(self, resumable_at_end: bool):
        """Makes the hook.

        Args:
          resumable_at_end: saves the optimizer state with the last checkpoint too, so that training can be extended.
        """
        self._resumable_at_end = resumable_at_end

    def on_step(self, run: TrainingRun, metrics: Mapping[str, jax.Array]) -> None:
        """Starts to save the step if a checkpoint is due."""
        del metrics
        if run.is_save_due or run.is_stopping:
            params_only = run.step == run.total_steps and not self._resumable_at_end
            with run.clocks.waiting("checkpoints"):
                run.checkpoints.save(run.step, run.state, params_only)
            for hook in run.hooks:
                hook.on_save(run)

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Waits until the checkpoints are written."""
        # All hosts end here, so that they can wait for each other.
        ends_together = error is None or isinstance(error, KeyboardInterrupt | Diverged)
        with run.clocks.waiting("checkpoints"):
            run.checkpoints.close(deletes=ends_together)
        signals.saves_first("")
