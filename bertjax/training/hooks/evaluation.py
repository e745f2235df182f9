"""Evaluates the model on held-out data, and ends training early: `config.eval`."""

import itertools
from collections.abc import Mapping

import jax

from bertjax.common.files import write_whole
from bertjax.common.progress import Pace
from bertjax.training import signals
from bertjax.training.checkpoints.checkpoint import has_stopped
from bertjax.training.hooks.hook import Hook, TrainingRun


class Evaluation(Hook):
    """Evaluates every `config.eval.every_steps` steps and at the end.

    Ends training after `config.eval.patience` evaluations in a row without a better score.
    """

    _has_compiled = False  # whether this process has evaluated

    def catch_up(self, run: TrainingRun) -> None:
        """Evaluates the checkpoint that the run resumes from, if an earlier process stopped before it did so."""
        if run.is_evaluation_due and run.scores is None:
            self._evaluate(run)

    def on_step(self, run: TrainingRun, metrics: Mapping[str, jax.Array]) -> None:
        """Evaluates the step if an evaluation is due. The checkpoint of the step is being saved."""
        del metrics
        if run.is_stopping or not run.is_evaluation_due:
            return
        is_regular = run.step == run.total_steps or run.step % run.config.eval.every_steps == 0
        signals.saves_first(f"step {run.step} is saved" + ", and evaluated when the run is resumed" * is_regular)
        self._evaluate(run)
        signals.saves_first(f"saving step {run.step + 1} first")
        if has_stopped(run.scores, run.config.eval.patience):
            run.end()

    def _evaluate(self, run: TrainingRun) -> None:
        """Evaluates the state, and stores the scores. A signal aborts it; the resumed run repeats it."""
        step, pace, batches = run.step, Pace(), itertools.count(1)

        def after_batch() -> None:
            if run.stops_now():
                raise KeyboardInterrupt(f"stopped at step {step}, during evaluation")
            number = next(batches)
            if pace.is_due():
                pace.printed()
                run.print(f"evaluating step {step}: {number:,} batches done")

        if not self._has_compiled:
            run.print(f"evaluating step {step} (compiles first)")
            self._has_compiled = True
        with run.clocks.waiting("evaluation"):
            scores = run.task.evaluator.run(run.program.gather(run.state.eval_params), step, after_batch)
            if scores is None:
                return
            if run.is_first_host and run.checkpoints.would_be_best(step, scores):
                for name, content in run.task.evaluator.files().items():
                    write_whole(run.workdir / name, content)
            for hook in run.hooks:
                hook.on_evaluation(run, scores)

        def evaluations(start: int, stop: int) -> int:
            """Returns how many regular evaluations there are after step `start`, up to step `stop`."""
            every = run.config.eval.every_steps
            return stop // every - start // every + (stop == run.total_steps and stop % every > 0)

        with run.clocks.waiting("checkpoints"):
            run.scores = run.checkpoints.add_scores(step, scores, evaluations)
