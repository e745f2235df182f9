"""Evaluates the model on held-out data, and stops training early if the score does not improve, see `config.eval`."""

import itertools
from collections.abc import Mapping

import jax

from bertjax.common.files import write_whole
from bertjax.common.progress import Pace
from bertjax.training import signals
from bertjax.training.checkpoints.checkpoint import has_stopped_early
from bertjax.training.hooks.hook import Hook, TrainingRun


class Evaluation(Hook):
    """Evaluates every `config.eval.every_steps` steps and at the end.

    Ends training after `config.eval.patience` evaluations in a row without a better score.
    """

    _has_compiled = False  # whether this process has evaluated before, so that the evaluation step is compiled
    _batches = 0  # the number of batches of the last evaluation

    def evaluate_if_missed(self, run: TrainingRun) -> None:
        """Evaluates the checkpoint from which the run resumes, if an earlier process stopped before this evaluation."""
        is_due = run.is_evaluation_due or run.checkpoints.is_evaluation_requested(run.step)
        if is_due and run.scores is None:
            self._evaluate(run)

    def on_step(self, run: TrainingRun, metrics: Mapping[str, jax.Array]) -> None:
        """Evaluates the model if an evaluation is due, while the checkpoint is written in the background."""
        del metrics
        if run.is_stopping or not run.is_evaluation_due:
            return
        signals.set_unsaved_work(f"step {run.step} is saved, and evaluated when the run is resumed")
        self._evaluate(run)
        signals.set_unsaved_work(f"saving step {run.step + 1} first")
        if has_stopped_early(run.scores, run.config.eval.patience):
            run.end()

    def _evaluate(self, run: TrainingRun) -> None:
        """Evaluates the state, and stores the scores. A signal aborts the evaluation, which the resumed run repeats."""
        step, pace, batches = run.step, Pace(), itertools.count(1)

        def after_batch() -> None:
            if run.should_stop():
                raise KeyboardInterrupt(f"stopped at step {step}, during evaluation")
            number = next(batches)
            if pace.is_due():
                pace.printed()
                of_total = f" of about {self._batches:,}" if number <= self._batches else ""
                run.print(f"evaluating step {step}: {number:,}{of_total} batches")

        if not self._has_compiled:
            run.print(f"evaluating step {step} (the first evaluation compiles the model)")
            self._has_compiled = True
        with run.clocks.measure("evaluation"):
            scores = run.task.evaluator.run(run.program.gather(run.state.eval_params), step, after_batch)
            self._batches = next(batches) - 1
            if scores is None:
                return
            if run.is_first_host and run.checkpoints.would_be_best(step, scores):
                for name, content in run.task.evaluator.files().items():
                    write_whole(run.workdir / name, content)
            for hook in run.hooks:
                hook.on_evaluation(run, scores)

        def count_evaluations(start: int, stop: int) -> int:
            """Returns the number of scheduled evaluations after step `start`, up to and including step `stop`."""
            every = run.config.eval.every_steps
            return stop // every - start // every + (stop == run.total_steps and stop % every > 0)

        with run.clocks.measure("checkpoints"):
            run.scores = run.checkpoints.add_scores(step, scores, count_evaluations)
