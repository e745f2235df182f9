"""Checkpoints of a run, with Orbax: written in the background, the latest few and the best one kept.

`WORKDIR/checkpoints/STEP` holds `params`, `rest` (step and optimizer state), and, once the step has been evaluated,
`scores.json`: what predict and convert need to know of that evaluation, and what decides which checkpoint is the best.
"""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from bertjax.config import UserError
from bertjax.files import write_whole
from bertjax.training.state import TrainState

FOLDER, SCORES = "checkpoints", "scores.json"
WHICH = re.compile(r"(.*)@(latest|best|\d+)")  # of a path: "runs/mrpc@best", "runs/mrpc@75"


@dataclasses.dataclass(frozen=True)
class Scores:
    """An evaluation, as it is kept beside a checkpoint.

    Args:
      scores: numbers by name.
      score: the one by which checkpoints are compared, higher is better; None: not comparable.
      measured_on: scores are compared only where this is the same (the length of the sequences, say).
      decided: numbers that the evaluation chose, for predict: the threshold of "no answer", say.
    """

    scores: dict[str, float | None]
    score: float | None = None
    measured_on: str = ""
    decided: dict[str, float] = dataclasses.field(default_factory=dict)


def folder_of(workdir: epath.PathLike) -> epath.Path:
    """`WORKDIR/checkpoints`, absolute as Orbax wants it."""
    folder = epath.Path(workdir) / FOLDER
    return folder if "://" in str(workdir) else folder.absolute()


def steps(workdir: epath.PathLike) -> list[int]:
    """The steps of the finished checkpoints of a run, rising."""
    folder = folder_of(workdir)
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.exists() else []


def read_scores(workdir: epath.PathLike, step: int) -> Scores | None:
    """None where the step has not been evaluated."""
    path = folder_of(workdir) / str(step) / SCORES
    if not path.exists():
        return None
    try:
        return Scores(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise UserError(f"{path}: damaged; delete it, and the step counts as not evaluated") from None


def write_scores(workdir: epath.PathLike, step: int, scores: Scores) -> None:
    """Beside a finished checkpoint."""
    text = json.dumps(dataclasses.asdict(_finite(scores)), indent=1)
    write_whole(folder_of(workdir) / str(step) / SCORES, text + "\n")


def _finite(scores: Scores) -> Scores:
    """With None for what is not a number, which JSON cannot say and nothing can be compared with."""

    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    numbers = {name: finite(value) for name, value in scores.scores.items()}
    return dataclasses.replace(scores, scores=numbers, score=finite(scores.score))


def best_of(found: dict[int, Scores]) -> int | None:
    """The step with the best score, the latest of equals; None where no step has one.

    Only steps that were measured on the same data as the newest are compared.
    """
    comparable = {step: scores for step, scores in sorted(found.items()) if scores.score is not None}
    if not comparable:
        return None
    newest = comparable[max(comparable)].measured_on
    comparable = {step: scores for step, scores in comparable.items() if scores.measured_on == newest}
    return max(comparable, key=lambda step: (comparable[step].score, step))


def best_step(workdir: epath.PathLike) -> int | None:
    """`best_of` the checkpoints of a run."""
    return best_of(_read_all_scores(workdir))


def _read_all_scores(workdir: epath.PathLike) -> dict[int, Scores]:
    return {step: scores for step in steps(workdir) if (scores := read_scores(workdir, step)) is not None}


def is_resumable(workdir: epath.PathLike, step: int) -> bool:
    """Whether a checkpoint has all that training needs, not the params alone."""
    return (folder_of(workdir) / str(step) / "rest").exists()


class Checkpoints(PreservationPolicy):
    """The checkpoints of a run while it trains.

    All hosts know all scores, so that they agree on which checkpoints to delete without a look at the disk.
    """

    def __init__(self, workdir: epath.PathLike, keep: int):
        self._workdir, self._keep, self._scores = workdir, keep, _read_all_scores(workdir)
        self._manager = ocp.CheckpointManager(
            folder_of(workdir),
            options=ocp.CheckpointManagerOptions(preservation_policy=self, cleanup_tmp_directories=True),
        )

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Orbax asks, with every save, which checkpoints to keep: the latest ones, and the best."""
        del context
        kept = self._kept([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]

    def _kept(self, steps: list[int]) -> set[int | None]:
        return {*steps[-self._keep :], self.best_step()}

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, params_only: bool = False) -> None:
        """Begins to save; returns as soon as the arrays are copied."""
        items = {"params": ocp.args.StandardSave(state.params)}
        if not params_only:
            items["rest"] = ocp.args.StandardSave({"step": state.step, "opt_state": state.opt_state})
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)  # when to save is the loop's to say

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a step, laid out as `abstract` says, on whatever mesh it was saved."""
        rest = {"step": abstract.step, "opt_state": abstract.opt_state}
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(abstract.params), rest=ocp.args.StandardRestore(rest)
            ),
        )
        return TrainState(restored.rest["step"], restored.params, restored.rest["opt_state"])

    def restore_params(self, step: int, abstract: dict) -> dict:
        """The params alone."""
        return self._manager.restore(step, args=ocp.args.Composite(params=ocp.args.StandardRestore(abstract))).params

    def scores(self, step: int | None) -> Scores | None:
        """None where the step has not been evaluated."""
        return self._scores.get(step)

    def best_step(self) -> int | None:
        """None where no checkpoint has a score."""
        return best_of(self._scores)

    def would_be_best(self, step: int, scores: Scores) -> bool:
        """Whether a checkpoint with these scores is the best of all."""
        return best_of({**self._scores, step: _finite(scores)}) == step

    def add_scores(self, step: int, scores: Scores) -> Scores:
        """Keeps the evaluation of a step beside its checkpoint, for which it waits; returns it as it is kept."""
        self._manager.wait_until_finished()
        self._scores[step] = _finite(scores)
        if jax.process_index() == 0:
            write_scores(self._workdir, step, scores)
        return self._scores[step]

    def close(self) -> None:
        """Waits for what is being written, and deletes what Orbax would delete with the next save."""
        self._manager.wait_until_finished()
        steps = list(self._manager.all_steps())
        for step in sorted(set(steps) - self._kept(steps)):
            self._manager.delete(step)
        self._manager.close()


def choose_step(workdir: epath.PathLike, which: str) -> int:
    """The step of the "latest" or the "best" checkpoint, or a number. Raises `UserError` where there is none."""
    found = steps(workdir)
    if not found:
        raise UserError(f"no finished checkpoint in {epath.Path(workdir) / FOLDER}")
    if which == "latest":
        return found[-1]
    if which == "best":
        if (best := best_step(workdir)) is None:
            raise UserError(f"{workdir}@best: none of its checkpoints has a score; take @latest")
        return best
    if int(which) not in found:
        raise UserError(f"{workdir}@{which}: no such checkpoint; there are {', '.join(map(str, found))}")
    return int(which)


def read_params(workdir: epath.PathLike, step: int) -> dict:
    """The params of a checkpoint, as NumPy arrays. Raises `UserError` where they cannot be read."""
    path = folder_of(workdir) / str(step) / "params"
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            tree = checkpointer.metadata(path).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            return checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
        except (ValueError, AttributeError, OSError) as error:
            raise UserError(f"{path}: damaged or incomplete ({str(error).splitlines()[0][:200]})") from None


def write_params(workdir: epath.PathLike, params: dict) -> None:
    """Params alone, as the checkpoint of step 0: something to start from or to predict with, not to resume."""
    path = folder_of(workdir) / "0" / "params"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, params)
