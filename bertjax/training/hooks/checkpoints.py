"""Saves the checkpoints of a run."""

from collections.abc import Mapping

import jax

from bertjax.training import signals
from bertjax.training.hooks.divergence import DivergenceError
from bertjax.training.hooks.hook import Hook, TrainingRun


class SaveCheckpoints(Hook):
    """Saves every `config.checkpoint.every_steps` steps, before each evaluation, and when a signal stops the run."""

    def __init__(self, save_final_opt_state: bool):
        """Makes the hook.

        Args:
          save_final_opt_state: whether the checkpoint of step `run.total_steps` contains the optimizer state. Earlier
            checkpoints always contain it.
        """
        self._resumable_at_end = save_final_opt_state

    def on_step(self, run: TrainingRun, metrics: Mapping[str, jax.Array]) -> None:
        """Starts to save a checkpoint if `run.is_save_due`, or if a signal stops the run."""
        del metrics
        if run.is_save_due or run.is_stopping:
            params_only = run.step == run.total_steps and not self._resumable_at_end
            with run.clocks.measure("checkpoints"):
                run.checkpoints.save(run.step, run.state, params_only, run.is_evaluation_requested)
            for hook in run.hooks:
                hook.on_save(run)

    def on_end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Waits until the checkpoints are written."""
        # These errors occur on all hosts at the same step. After other errors, a host must not wait for other hosts.
        ends_on_all_hosts = error is None or isinstance(error, KeyboardInterrupt | DivergenceError)
        with run.clocks.measure("checkpoints"):
            run.checkpoints.close(delete_old=ends_on_all_hosts)
        signals.set_unsaved_work("")
