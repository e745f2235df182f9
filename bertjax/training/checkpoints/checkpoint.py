"""Orbax checkpoints of a run, written in the background. The latest checkpoints and the best checkpoint are kept.

`WORKDIR/checkpoints/STEP` contains:
- `params`;
- `rest`: the step and the optimizer state; without this item, a run cannot resume from the checkpoint;
- `average`: the moving average of the params, if the run has it;
- `memory`: the carry (`TrainState.carry`), such as recurrent memory, if the task has a carry;
- `checksums` of these items;
- `evaluation_request`, an empty JSON object, if a hook requested an evaluation of the step;
- `scores.json` after the evaluation of the step. These scores determine the best checkpoint.

A run resumes from the latest intact checkpoint, and moves later, damaged checkpoints to `WORKDIR/checkpoints-damaged`.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import PreservationPolicy

from bertjax.common import checksums
from bertjax.common.errors import UserError
from bertjax.common.files import absolute, read_json, write_whole
from bertjax.distributed import hosts
from bertjax.training.scores import Scores
from bertjax.training.state import TrainState

FOLDER, DAMAGED_FOLDER, SCORES = "checkpoints", "checkpoints-damaged", "scores.json"
CHECKSUMS_FILE = "checksums/metadata"  # path in the folder of a step; Orbax chooses the name of the file
PARAMS, REST, AVERAGE, CARRY = "params", "rest", "average", "memory"  # items of a checkpoint
EVALUATION_REQUEST = "evaluation_request"  # an item without arrays
NO_STEP, ALL_DAMAGED = -1, -2  # integers that the first host broadcasts instead of a step
# Messages of transient errors of the storage. After such an error, the checkpoint may be intact.
TRANSIENT_ERRORS = re.compile(
    "UNAVAILABLE|DEADLINE_EXCEEDED|UNAUTHENTICATED|PERMISSION_DENIED|Permission denied|Too many open files|"
    "Cannot allocate memory|Input/output error|Stale file handle|timed out"
)


class TemporarilyUnreadable(UserError):
    """A checkpoint cannot be read now because of a transient error, but may be intact."""


def folder_of(workdir: epath.PathLike) -> epath.Path:
    """Returns `WORKDIR/checkpoints` as an absolute path, which Orbax requires."""
    return absolute(workdir) / FOLDER


def steps(workdir: epath.PathLike) -> list[int]:
    """Returns the steps of the finished checkpoints of a run, ascending."""
    folder = folder_of(workdir)
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.exists() else []


def read_scores(workdir: epath.PathLike, step: int) -> Scores | None:
    """Returns the scores of a step; None before the evaluation. Raises `UserError` if the file is damaged."""
    path = folder_of(workdir) / str(step) / SCORES
    if not path.exists():
        return None
    return read_json(path, Scores, "delete it to mark the step as not evaluated")


def write_scores(workdir: epath.PathLike, step: int, scores: Scores) -> None:
    """Writes the scores of a finished checkpoint."""
    text = json.dumps(dataclasses.asdict(_nonfinite_to_none(scores)), indent=1)
    write_whole(folder_of(workdir) / str(step) / SCORES, text + "\n")


def _nonfinite_to_none(scores: Scores) -> Scores:
    """Replaces NaN and infinity by None, because JSON cannot store them and they cannot rank checkpoints."""

    def to_none(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    numbers = {name: to_none(value) for name, value in scores.scores.items()}
    return dataclasses.replace(scores, scores=numbers, score=to_none(scores.score))


def best_step_of(scores: dict[int, Scores]) -> int | None:
    """Returns the step with the highest score, the latest one if scores are equal; None if no step has a score.

    Compares only steps with the same `Scores.measured_on` as the latest step with a score.
    """
    ranked = {step: x for step, x in scores.items() if x.score is not None}
    if not ranked:
        return None
    measured_on = ranked[max(ranked)].measured_on
    values = {step: x.score for step, x in ranked.items() if x.score is not None and x.measured_on == measured_on}
    return max(values, key=lambda step: (values[step], step))


def has_stopped_early(scores: Scores | None, patience: int) -> bool:
    """Returns whether early stopping has ended a run.

    Args:
      scores: the scores of the last checkpoint; None without scores.
      patience: `config.eval.patience`.
    """
    return scores is not None and 0 < patience <= scores.waited


def best_step(workdir: epath.PathLike) -> int | None:
    """Returns the step of the best checkpoint of a run, by `best_step_of`."""
    return best_step_of(_read_all_scores(workdir))


def _read_all_scores(workdir: epath.PathLike) -> dict[int, Scores]:
    """Returns {step: scores} of the evaluated checkpoints."""
    return {step: scores for step in steps(workdir) if (scores := read_scores(workdir, step)) is not None}


def is_resumable(workdir: epath.PathLike, step: int) -> bool:
    """Returns whether a checkpoint has the optimizer state, so that training can resume from it."""
    return (folder_of(workdir) / str(step) / REST).exists()


def latest_intact_step(workdir: epath.PathLike) -> int | None:
    """Returns the step of the latest intact checkpoint; None if the run has no checkpoint.

    Moves later, damaged checkpoints to `DAMAGED_FOLDER`. All hosts must call this. Only the first host reads the
    checkpoints.

    Raises:
      UserError: all checkpoints are damaged, or a checkpoint cannot be read now because of a transient error.
    """
    damaged, step = epath.Path(workdir) / DAMAGED_FOLDER, NO_STEP
    if jax.process_index() == 0:
        while (saved_steps := steps(workdir)) and (damage := _describe_damage(workdir, saved_steps[-1])):
            target = _move_damaged(workdir, saved_steps[-1])
            print(f"{damage}; moved this checkpoint to {target}", flush=True)
        step = saved_steps[-1] if saved_steps else ALL_DAMAGED if damaged.exists() else NO_STEP
    step = hosts.as_on_first(step)
    if step == ALL_DAMAGED:
        raise UserError(f"{workdir}: all checkpoints were damaged, see {damaged}; choose another --workdir")
    return None if step == NO_STEP else step


def _describe_damage(workdir: epath.PathLike, step: int) -> str:
    """Reads a whole checkpoint. Returns a message about the damage; "" if the checkpoint is intact."""
    try:
        checksums_of_items = _read_checksums(workdir, step)
        _read_item(workdir, step, PARAMS, checksums_of_items)
        for item in (AVERAGE, CARRY):
            if checksums_of_items and item in checksums_of_items:
                _read_item(workdir, step, item, checksums_of_items)
        if is_resumable(workdir, step) or (checksums_of_items and REST in checksums_of_items):
            rest = _read_item(workdir, step, REST, checksums_of_items)
            if (stored_step := np.asarray(rest.get("step"))) != step:
                raise UserError(f"{folder_of(workdir) / str(step)}: has the checkpoint of step {stored_step}")
        read_scores(workdir, step)
    except TemporarilyUnreadable:
        raise
    except UserError as error:
        return str(error)
    return ""


def _move_damaged(workdir: epath.PathLike, step: int) -> epath.Path:
    """Moves a checkpoint to `DAMAGED_FOLDER`. Returns the new path, which does not replace an earlier checkpoint."""
    folder = epath.Path(workdir) / DAMAGED_FOLDER
    folder.mkdir(exist_ok=True)
    names = itertools.chain([str(step)], (f"{step}-{i}" for i in itertools.count(2)))
    target = next(folder / name for name in names if not (folder / name).exists())
    (folder_of(workdir) / str(step)).rename(target)
    return target


def check_resumable(workdir: epath.PathLike, step: int, total_steps: int | None) -> None:
    """Raises `UserError` if training cannot resume from the checkpoint of `step`.

    Args:
      workdir: the workdir of the run.
      step: the step of the checkpoint.
      total_steps: the last step of the run; None if unknown.
    """
    if total_steps is not None and step > total_steps:
        raise UserError(
            f"{workdir}: the checkpoint is at step {step}, past the last step of the config, {total_steps}; "
            "choose another --workdir"
        )
    if step != total_steps and not is_resumable(workdir, step):
        raise UserError(
            f"{workdir}: the checkpoint of step {step} has no optimizer state, so that training cannot resume from it; "
            f"start a new run from these params with --config.init_checkpoint={workdir} and another --workdir"
        )


class _Manager(ocp.CheckpointManager):
    """`CheckpointManager` that does not check for preemption.

    The training loop checks for preemption (`signals`). JAX requires that the steps of successive checks increase, so
    that only one part of the program can check.
    """

    def reached_preemption(self, step: int) -> bool:
        """Returns False."""
        return False


class Checkpoints(PreservationPolicy):
    """The checkpoints of a run during training.

    Every host holds the scores of all steps, so that all hosts delete the same checkpoints without reading files.
    """

    def __init__(self, workdir: epath.PathLike, keep: int, keep_every: int = 0):
        """Opens the checkpoints of a run. All hosts must call this.

        Args:
          workdir: the workdir of the run.
          keep: the number of latest checkpoints to keep.
          keep_every: checkpoints of multiples of this number are also kept; 0 for none.
        """
        self._workdir, self._keep, self._keep_every = workdir, keep, keep_every
        self._scores = _read_all_scores(workdir)
        self._manager = _Manager(
            folder_of(workdir),
            options=ocp.CheckpointManagerOptions(preservation_policy=self, cleanup_tmp_directories=True),
        )

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns for each checkpoint whether Orbax keeps it. Orbax calls this when it saves a checkpoint."""
        del context
        kept = self._steps_to_keep([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]

    def _steps_to_keep(self, steps: list[int]) -> set[int | None]:
        """Returns the latest steps, the multiples of `keep_every`, and the best step."""
        regular = [step for step in steps if self._keep_every and step % self._keep_every == 0]
        return {*steps[-self._keep :], *regular, self.best_step()}

    def latest_step(self) -> int | None:
        """Returns the step of the latest checkpoint, including pending writes; None if there are no checkpoints."""
        return self._manager.latest_step()

    def save(
        self, step: int, state: TrainState, params_only: bool = False, is_evaluation_requested: bool = False
    ) -> None:
        """Starts to save a checkpoint; returns after the arrays are copied to the host.

        Args:
          step: the step of the checkpoint.
          state: the state after this step.
          params_only: whether to save only the params and the moving average.
          is_evaluation_requested: whether a resumed run must evaluate the step if this process stops before the
            evaluation.
        """
        request = {EVALUATION_REQUEST: ocp.args.JsonSave({})} if is_evaluation_requested else {}
        arguments = _with_checksums(_items_of(state, params_only), **request)
        self._manager.save(step, args=arguments, force=True)  # the loop decides when to save

    def is_evaluation_requested(self, step: int) -> bool:
        """Returns whether the saved step was saved with `is_evaluation_requested`; the same on all hosts."""
        return bool(hosts.as_on_first(int((folder_of(self._workdir) / str(step) / EVALUATION_REQUEST).exists())))

    def restore(self, step: int, abstract: TrainState, params_only: bool = False) -> TrainState:
        """Restores the state of a step onto the current mesh, which may differ from the mesh of the saved state.

        The carry is None if the checkpoint has no carry, or a carry of other shapes.

        Args:
          step: the step of the checkpoint.
          abstract: shapes, types and shardings of the state.
          params_only: whether to restore only the params and the moving average. The other fields are then None.
        """
        return _restore(self._manager, step, abstract, params_only)

    def scores(self, step: int | None) -> Scores | None:
        """Returns the scores of a step; None if the step is None or not evaluated."""
        return None if step is None else self._scores.get(step)

    def best_step(self) -> int | None:
        """Returns the step of the best checkpoint; None if no checkpoint has a score."""
        return best_step_of(self._scores)

    def would_be_best(self, step: int, scores: Scores) -> bool:
        """Returns whether a checkpoint with these scores would be the best."""
        return best_step_of({**self._scores, step: _nonfinite_to_none(scores)}) == step

    def add_scores(self, step: int, scores: Scores, count_evaluations: Callable[[int, int], int]) -> Scores:
        """Waits until the checkpoint of the step is written, then writes the scores to the folder of the checkpoint.

        Args:
          step: the evaluated step.
          scores: the scores, without `Scores.waited`.
          count_evaluations: (start, stop) -> the number of scheduled evaluations after step `start`, up to and
            including step `stop`.

        Returns:
          The stored scores: `waited` is set, and None replaces NaN and infinity.
        """
        self._manager.wait_until_finished()
        scores = _nonfinite_to_none(scores)
        scores = dataclasses.replace(scores, waited=self._count_without_improvement(step, scores, count_evaluations))
        self._scores[step] = scores
        if jax.process_index() == 0:
            write_scores(self._workdir, step, scores)
        return scores

    def _count_without_improvement(
        self, step: int, scores: Scores, count_evaluations: Callable[[int, int], int]
    ) -> int:
        """Returns `Scores.waited`: the number of evaluations in a row, up to this step, that did not improve the score.

        Counts from the best earlier checkpoint, which is always kept.
        """
        earlier = {s: x for s, x in self._scores.items() if s < step and x.measured_on == scores.measured_on}
        best = best_step_of(earlier)
        best_score = None if best is None else earlier[best].score
        if scores.score is not None and (best_score is None or scores.score > best_score):
            return 0
        return count_evaluations(0, step) if best is None else earlier[best].waited + count_evaluations(best, step)

    def close(self, delete_old: bool) -> None:
        """Waits for pending writes and closes Orbax's manager.

        Args:
          delete_old: whether to delete the checkpoints that Orbax would delete on the next save. If True, all hosts
            must call this.
        """
        self._manager.wait_until_finished()
        steps = list(self._manager.all_steps())
        for step in sorted(set(steps) - self._steps_to_keep(steps)) if delete_old else ():
            self._manager.delete(step)
        self._manager.close()


def _items_of(state: TrainState, params_only: bool) -> dict[str, Any]:
    """Returns the items of a checkpoint, {item name: tree of arrays}."""
    items: dict[str, Any] = {PARAMS: state.params}
    if state.average is not None:
        items[AVERAGE] = state.average
    if not params_only:
        items[REST] = {"step": state.step, "opt_state": state.opt_state}
        items |= {} if state.carry is None else {CARRY: state.carry}
    return items


def _restore(manager: ocp.CheckpointManager, step: int, abstract: TrainState, params_only: bool = False) -> TrainState:
    """Restores the state of a step, as `Checkpoints.restore`."""
    items = _items_of(abstract, params_only)
    if CARRY in items and not _has_carry(manager.directory / str(step), abstract):
        del items[CARRY]
    arguments = {item: ocp.args.StandardRestore(tree) for item, tree in items.items()}
    restored = manager.restore(step, args=ocp.args.Composite(**arguments))
    rest: dict[str, Any] = {"step": None, "opt_state": None} if params_only else restored.rest
    average, carry = restored.get(AVERAGE), restored.get(CARRY)
    return TrainState(rest["step"], restored.params, rest["opt_state"], average, carry)


def _has_carry(folder: epath.Path, abstract: TrainState) -> bool:
    """Returns whether the folder of a checkpoint has a carry with the shapes of `abstract.carry`."""
    if abstract.carry is None or not (folder / CARRY).exists():
        return False
    with _checkpointer_of_this_host() as checkpointer:
        saved = checkpointer.metadata(folder / CARRY).item_metadata.tree
    saved_shapes, shapes = (sorted(tuple(x.shape) for x in jax.tree.leaves(tree)) for tree in (saved, abstract.carry))
    return saved_shapes == shapes


class Parent(NamedTuple):
    """The checkpoint of another run from which a new run continues, see `config.branch_from`."""

    workdir: epath.Path
    step: int


def find_parent(path: str) -> Parent:
    """Parses `config.branch_from`, WORKDIR@STEP or WORKDIR@latest, and checks the checkpoint. All hosts must call this.

    Raises:
      UserError: training cannot resume from the checkpoint, or the checkpoint is damaged.
    """
    workdir, at, which = path.rpartition("@")
    try:
        if not at or not (which == "latest" or which.isdecimal()):
            raise UserError("must be WORKDIR@STEP or WORKDIR@latest")
        # The parent may still train, so that hosts see different steps.
        step = hosts.as_on_first(resolve_step(workdir, which))
        if not is_resumable(workdir, step):
            raise UserError(f"the checkpoint of step {step} has no optimizer state; choose an earlier step")
        damage = _describe_damage(workdir, step) if jax.process_index() == 0 else ""
        if hosts.as_on_first(int(bool(damage))):
            raise UserError(damage or f"the checkpoint of step {step} is damaged; choose another step")
    except UserError as error:
        raise UserError(f"config.branch_from = {path!r}: {error}") from None
    return Parent(epath.Path(workdir), step)


def restore_from(workdir: epath.PathLike, step: int, abstract: TrainState) -> TrainState:
    """Restores a state from a checkpoint of another run. The files of the other run do not change."""
    options = ocp.CheckpointManagerOptions(read_only=True)
    with contextlib.closing(_Manager(folder_of(workdir), options=options)) as manager:
        return _restore(manager, step, abstract)


def resolve_step(workdir: epath.PathLike, which: str) -> int:
    """Returns the step of a checkpoint.

    Args:
      workdir: the workdir of the run.
      which: "latest", "best", or a step.

    Raises:
      UserError: the run does not have this checkpoint.
    """
    saved_steps = steps(workdir)
    if not saved_steps:
        raise UserError(f"no finished checkpoint in {epath.Path(workdir) / FOLDER}")
    if which == "latest":
        return saved_steps[-1]
    if which == "best":
        if (best := best_step(workdir)) is None:
            raise UserError(f"{workdir}@best: no checkpoint has a score; use @latest")
        return best
    if int(which) not in saved_steps:
        raise UserError(
            f"{workdir}@{which}: the run has no checkpoint of this step; choose one of the steps "
            f"{', '.join(map(str, saved_steps))}"
        )
    return int(which)


def read_params(workdir: epath.PathLike, step: int) -> dict:
    """Reads the moving average of the params, or the params if the checkpoint has no average, as NumPy arrays.

    Raises:
      UserError: the item is damaged or cannot be read now.
    """
    item = AVERAGE if (folder_of(workdir) / str(step) / AVERAGE).exists() else PARAMS
    return _read_item(workdir, step, item, _read_checksums(workdir, step))


def _read_item(workdir: epath.PathLike, step: int, item: str, checksums_of_items: dict | None) -> dict:
    """Reads an item of a checkpoint as NumPy arrays, and verifies the checksums unless `checksums_of_items` is None."""
    path = folder_of(workdir) / str(step) / item
    try:
        with _checkpointer_of_this_host() as checkpointer:
            if (metadata := checkpointer.metadata(path).item_metadata) is None:
                raise ValueError("cannot read the metadata")
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
            content = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
            actual = {name: checksums.of_numpy(np.asarray(x)) for name, x in checksums.arrays_by_name(content).items()}
    except Exception as error:  # Orbax and TensorStore raise errors of many types for a damaged file
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        if isinstance(error, MemoryError) or TRANSIENT_ERRORS.search(str(error)):
            raise TemporarilyUnreadable(f"{path}: cannot be read now ({reason})") from None
        raise UserError(f"{path}: damaged or incomplete ({reason})") from None
    if checksums_of_items is not None:
        expected = checksums_of_items.get(item, {})
        if wrong := sorted(name for name in {*actual, *expected} if actual.get(name) != expected.get(name)):
            more = f" and {len(wrong) - 1} more" * (len(wrong) > 1)
            raise UserError(f"{path}: damaged: wrong checksum of {wrong[0]}{more}")
    return content


def _checkpointer_of_this_host() -> ocp.Checkpointer:
    """Returns a checkpointer that works on this host alone. By default, Orbax synchronizes all hosts."""
    host = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(host, {host}, barrier_sync_key_prefix=f"host{host}")
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


def _read_checksums(workdir: epath.PathLike, step: int) -> dict | None:
    """Returns {item: {array name: checksum}}; None for a checkpoint of an older version without checksums."""
    path = folder_of(workdir) / str(step) / CHECKSUMS_FILE
    if not path.exists():
        return None
    checksums_of_items = read_json(path, dict[str, dict[str, int]])
    if PARAMS not in checksums_of_items:
        raise UserError(f"{path}: damaged: no checksums of {PARAMS}")
    return checksums_of_items


def _with_checksums(items: dict, **more: ocp.args.JsonSave) -> ocp.args.Composite:
    """Returns Orbax's arguments to save the items, their checksums, and more items without arrays."""
    sums = {item: checksums.of_tree(tree) for item, tree in items.items()}
    to_save = {item: ocp.args.StandardSave(tree) for item, tree in items.items()}
    return ocp.args.Composite(**to_save, checksums=ocp.args.JsonSave(sums), **more)


def write_params(workdir: epath.PathLike, params: dict) -> None:
    """Writes params as a checkpoint of step 0 for initialization and inference, without an optimizer state."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder_of(workdir) / "0", args=_with_checksums({PARAMS: params}))
