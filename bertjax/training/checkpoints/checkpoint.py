"""Orbax checkpoints of a run, written in the background; keeps the latest few and the best one.

`WORKDIR/checkpoints/STEP` holds `params`, `rest` (step and optimizer state), perhaps the `average` of the params and
the `memory` of rows that go on in the next step, the `checksums` of these and, once the step has been evaluated,
`scores.json`, which predict and convert read and which determines the best checkpoint. A run goes on from the latest
checkpoint that is what was saved; it moves those that are not to `WORKDIR/checkpoints-damaged`.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from typing import NamedTuple

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
CHECKSUMS_FILE = "checksums/metadata"  # path in a step's folder; the name is Orbax's
AVERAGE = "average"  # the item of a checkpoint that has the moving average of the params
MEMORY = "memory"  # the item that has what the rows of a batch remember
NO_STEP, ALL_DAMAGED = -1, -2
# In the messages of TensorStore and of systems, whatever the type of the error: these say nothing of the content.
MAY_PASS = re.compile(
    "UNAVAILABLE|DEADLINE_EXCEEDED|UNAUTHENTICATED|PERMISSION_DENIED|Permission denied|Too many open files|"
    "Cannot allocate memory|Input/output error|Stale file handle|timed out"
)


class Unreadable(UserError):
    """A checkpoint cannot be read, which may pass."""


def folder_of(workdir: epath.PathLike) -> epath.Path:
    """Returns `WORKDIR/checkpoints` as an absolute path, which Orbax requires."""
    return absolute(workdir) / FOLDER


def steps(workdir: epath.PathLike) -> list[int]:
    """Returns the steps of the finished checkpoints of a run, ascending."""
    folder = folder_of(workdir)
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.exists() else []


def read_scores(workdir: epath.PathLike, step: int) -> Scores | None:
    """Returns the scores of a step; None if it has not been evaluated. Raises `UserError` if the file is damaged."""
    path = folder_of(workdir) / str(step) / SCORES
    if not path.exists():
        return None
    return read_json(path, Scores, "delete it to mark the step as not evaluated")


def write_scores(workdir: epath.PathLike, step: int, scores: Scores) -> None:
    """Writes the scores of a finished checkpoint."""
    text = json.dumps(dataclasses.asdict(_finite(scores)), indent=1)
    write_whole(folder_of(workdir) / str(step) / SCORES, text + "\n")


def _finite(scores: Scores) -> Scores:
    """Replaces NaN and infinity by None: JSON cannot represent them, and they cannot be ranked."""

    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    numbers = {name: finite(value) for name, value in scores.scores.items()}
    return dataclasses.replace(scores, scores=numbers, score=finite(scores.score))


def best_of(found: dict[int, Scores]) -> int | None:
    """Returns the step with the best score, the latest on a tie; None if no step has a score.

    Compares only steps with the same `measured_on` as the latest one.
    """
    comparable = {step: scores for step, scores in sorted(found.items()) if scores.score is not None}
    if not comparable:
        return None
    newest = comparable[max(comparable)].measured_on
    comparable = {step: scores for step, scores in comparable.items() if scores.measured_on == newest}
    return max(comparable, key=lambda step: (comparable[step].score, step))


def has_stopped(scores: Scores | None, patience: int) -> bool:
    """Returns whether a run whose last checkpoint has these scores has stopped early (`config.eval.patience`)."""
    return scores is not None and 0 < patience <= scores.waited


def best_step(workdir: epath.PathLike) -> int | None:
    """Returns the step of the best checkpoint of a run, by `best_of`."""
    return best_of(_read_all_scores(workdir))


def _read_all_scores(workdir: epath.PathLike) -> dict[int, Scores]:
    return {step: scores for step in steps(workdir) if (scores := read_scores(workdir, step)) is not None}


def is_resumable(workdir: epath.PathLike, step: int) -> bool:
    """Returns whether training can resume from a checkpoint: it has the optimizer state, not only params."""
    return (folder_of(workdir) / str(step) / "rest").exists()


def latest_intact_step(workdir: epath.PathLike) -> int | None:
    """Returns the latest step whose checkpoint is what was saved; None if nothing was saved.

    Moves later ones, which are damaged, out of the way. All hosts must call this; the first one reads the checkpoints.
    Raises `UserError` if all are damaged, or if one cannot be read for another reason.
    """
    damaged, step = epath.Path(workdir) / DAMAGED_FOLDER, NO_STEP
    if jax.process_index() == 0:
        while (found := steps(workdir)) and (damage := _find_damage(workdir, found[-1])):
            target = _move_away(workdir, found[-1])
            print(f"{damage}; moved this checkpoint to {target}", flush=True)
        step = found[-1] if found else ALL_DAMAGED if damaged.exists() else NO_STEP
    step = hosts.as_on_first(step)
    if step == ALL_DAMAGED:
        raise UserError(f"{workdir}: all its checkpoints were damaged, see {damaged}; choose another --workdir")
    return None if step == NO_STEP else step


def _find_damage(workdir: epath.PathLike, step: int) -> str:
    """Reads a checkpoint; returns in what it differs from what was saved, "" if in nothing."""
    try:
        saved = _read_checksums(workdir, step)
        _read(workdir, step, "params", saved)
        for item in (AVERAGE, MEMORY):
            if saved and item in saved:
                _read(workdir, step, item, saved)
        if is_resumable(workdir, step) or (saved and "rest" in saved):
            rest = _read(workdir, step, "rest", saved)
            if (its_step := np.asarray(rest.get("step"))) != step:
                raise UserError(f"{folder_of(workdir) / str(step)}: is the checkpoint of step {its_step}")
        read_scores(workdir, step)
    except Unreadable:  # an unreadable checkpoint need not be damaged
        raise
    except UserError as error:
        return str(error)
    return ""


def _move_away(workdir: epath.PathLike, step: int) -> epath.Path:
    folder = epath.Path(workdir) / DAMAGED_FOLDER
    folder.mkdir(exist_ok=True)
    names = itertools.chain([str(step)], (f"{step}-{i}" for i in itertools.count(2)))
    target = next(folder / name for name in names if not (folder / name).exists())
    (folder_of(workdir) / str(step)).rename(target)
    return target


def check_resumable(workdir: epath.PathLike, step: int, total_steps: int | None) -> None:
    """Raises `UserError` if training to `total_steps` (None if unknown) cannot resume from the checkpoint of `step`."""
    if total_steps is not None and step > total_steps:
        raise UserError(f"{workdir} is at step {step}, past the config's {total_steps}; choose another --workdir")
    if step != total_steps and not is_resumable(workdir, step):
        raise UserError(
            f"{workdir} holds params without the optimizer's state, which cannot be resumed; start a new run from them "
            f"with --config.init_checkpoint={workdir} and another --workdir"
        )


class _Manager(ocp.CheckpointManager):
    """Does not ask JAX about preemption: the training loop does, and JAX expects one increasing sequence of steps."""

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints(PreservationPolicy):
    """The checkpoints of a run during training.

    Every host holds all scores, so that the hosts agree on which checkpoints to delete without reading them.
    """

    def __init__(self, workdir: epath.PathLike, keep: int, keep_every: int = 0):
        self._workdir, self._keep, self._keep_every = workdir, keep, keep_every
        self._scores = _read_all_scores(workdir)
        self._manager = _Manager(
            folder_of(workdir),
            options=ocp.CheckpointManagerOptions(preservation_policy=self, cleanup_tmp_directories=True),
        )

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Tells Orbax, on every save, which checkpoints to keep: the latest few, the best, and each `keep_every`."""
        del context
        kept = self._kept([info.step for info in checkpoints])
        return [info.step in kept for info in checkpoints]

    def _kept(self, steps: list[int]) -> set[int | None]:
        regular = [step for step in steps if self._keep_every and step % self._keep_every == 0]
        return {*steps[-self._keep :], *regular, self.best_step()}

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, params_only: bool = False) -> None:
        """Starts saving; returns once the arrays are copied."""
        items = {"params": state.params}
        if state.average is not None:
            items[AVERAGE] = state.average
        if not params_only:
            items["rest"] = {"step": state.step, "opt_state": state.opt_state}
            items |= {} if state.memory is None else {MEMORY: state.memory}
        self._manager.save(step, args=_with_checksums(items), force=True)  # the loop decides when to save

    def restore(self, step: int, abstract: TrainState, params_only: bool = False) -> TrainState:
        """Restores the state of a step with the shardings of `abstract`, whatever mesh it was saved on.

        Its memory is None if the checkpoint has none of this shape. `params_only`: without its step and the optimizer's
        state.
        """
        return _restore(self._manager, step, abstract, params_only)

    def scores(self, step: int | None) -> Scores | None:
        """Returns the scores of a step; None if it has not been evaluated."""
        return self._scores.get(step)

    def best_step(self) -> int | None:
        """Returns the step of the best checkpoint; None if none has a score."""
        return best_of(self._scores)

    def would_be_best(self, step: int, scores: Scores) -> bool:
        """Returns whether a checkpoint with these scores would be the best."""
        return best_of({**self._scores, step: _finite(scores)}) == step

    def add_scores(self, step: int, scores: Scores, evaluations: Callable[[int, int], int]) -> Scores:
        """Waits for the checkpoint of the step, then stores the scores beside it; returns them as stored.

        `evaluations`: (start, stop) -> how many there are after step `start`, up to `stop`.
        """
        self._manager.wait_until_finished()
        found = _finite(scores)
        self._scores[step] = found = dataclasses.replace(found, waited=self._waited(step, found, evaluations))
        if jax.process_index() == 0:
            write_scores(self._workdir, step, found)
        return found

    def _waited(self, step: int, found: Scores, evaluations: Callable[[int, int], int]) -> int:
        """Returns `Scores.waited` of a step. The best checkpoint before it, which is always kept, tells enough."""
        before = {each: x for each, x in self._scores.items() if each < step and x.measured_on == found.measured_on}
        best = best_of(before)
        if found.score is not None and (best is None or found.score > before[best].score):
            return 0
        return evaluations(0, step) if best is None else before[best].waited + evaluations(best, step)

    def close(self, deletes: bool) -> None:
        """Waits for pending writes.

        `deletes` those checkpoints that Orbax would delete on the next save, for which all hosts must call this.
        """
        self._manager.wait_until_finished()
        steps = list(self._manager.all_steps())
        for step in sorted(set(steps) - self._kept(steps)) if deletes else ():
            self._manager.delete(step)
        self._manager.close()


def _restore(manager: ocp.CheckpointManager, step: int, abstract: TrainState, params_only: bool = False) -> TrainState:
    items = {"params": abstract.params}
    if abstract.average is not None:
        items[AVERAGE] = abstract.average
    if not params_only:
        items["rest"] = {"step": abstract.step, "opt_state": abstract.opt_state}
        items |= {MEMORY: abstract.memory} if _has_memory(manager.directory / str(step), abstract) else {}
    wanted = {item: ocp.args.StandardRestore(tree) for item, tree in items.items()}
    found = manager.restore(step, args=ocp.args.Composite(**wanted))
    rest = {} if params_only else found.rest
    return TrainState(rest.get("step"), found.params, rest.get("opt_state"), found.get(AVERAGE), found.get(MEMORY))


def _has_memory(folder: epath.Path, abstract: TrainState) -> bool:
    """Returns whether a checkpoint has the memory of as many rows, layers and tokens as a state has."""
    if abstract.memory is None or not (folder / MEMORY).exists():
        return False
    with _checkpointer_of_this_host() as checkpointer:
        saved = checkpointer.metadata(folder / MEMORY).item_metadata.tree
    shapes, wanted = (sorted(tuple(x.shape) for x in jax.tree.leaves(tree)) for tree in (saved, abstract.memory))
    return shapes == wanted


class Parent(NamedTuple):
    """The checkpoint of another run from which a run branches off."""

    workdir: epath.Path
    step: int


def find_parent(path: str) -> Parent:
    """Returns the checkpoint that WORKDIR@STEP, or @latest, names. Raises `UserError` unless it can be resumed."""
    workdir, at, which = path.rpartition("@")
    try:
        if not at or not (which == "latest" or which.isdecimal()):
            raise UserError("write WORKDIR@STEP, or WORKDIR@latest")
        step = hosts.as_on_first(choose_step(workdir, which))  # a parent that still trains goes on meanwhile
        if not is_resumable(workdir, step):
            raise UserError(f"step {step} has params without the optimizer's state; name a step from before the end")
        damage = _find_damage(workdir, step) if jax.process_index() == 0 else ""
        if hosts.as_on_first(int(bool(damage))):
            raise UserError(damage or f"step {step} is damaged")
    except UserError as error:
        raise UserError(f"config.branch_from = {path!r}: {error}") from None
    return Parent(epath.Path(workdir), step)


def restore_from(workdir: epath.PathLike, step: int, abstract: TrainState) -> TrainState:
    """Restores the state of another run, in which nothing is changed."""
    options = ocp.CheckpointManagerOptions(read_only=True)
    with contextlib.closing(_Manager(folder_of(workdir), options=options)) as manager:
        return _restore(manager, step, abstract)


def choose_step(workdir: epath.PathLike, which: str) -> int:
    """Returns the step of the "latest" or "best" checkpoint, or a given step. Raises `UserError` if it is missing."""
    found = steps(workdir)
    if not found:
        raise UserError(f"no finished checkpoint in {epath.Path(workdir) / FOLDER}")
    if which == "latest":
        return found[-1]
    if which == "best":
        if (best := best_step(workdir)) is None:
            raise UserError(f"{workdir}@best: none of its checkpoints has a score; use @latest")
        return best
    if int(which) not in found:
        raise UserError(f"{workdir}@{which}: no such checkpoint; there are {', '.join(map(str, found))}")
    return int(which)


def read_params(workdir: epath.PathLike, step: int) -> dict:
    """Reads the params of a checkpoint as NumPy arrays, or their average if the run has one.

    Raises `UserError` if they are not what was saved.
    """
    item = AVERAGE if (folder_of(workdir) / str(step) / AVERAGE).exists() else "params"
    return _read(workdir, step, item, _read_checksums(workdir, step))


def _read(workdir: epath.PathLike, step: int, item: str, saved: dict | None) -> dict:
    """Reads an item of a checkpoint as NumPy arrays, and compares it with its checksums, if there are any."""
    path = folder_of(workdir) / str(step) / item
    try:
        with _checkpointer_of_this_host() as checkpointer:
            if (metadata := checkpointer.metadata(path).item_metadata) is None:
                raise ValueError("its metadata cannot be read")
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
            found = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
            own = {name: checksums.of_numpy(x) for name, x in checksums.names_of(found).items()}
    except Exception as error:  # whatever a damaged file causes in Orbax, TensorStore and what they use
        reason = next(iter(str(error).splitlines()), type(error).__name__)[:200]
        if isinstance(error, MemoryError) or MAY_PASS.search(str(error)):
            raise Unreadable(f"{path}: cannot be read now ({reason})") from None
        raise UserError(f"{path}: damaged or incomplete ({reason})") from None
    if saved is not None:
        expected = saved.get(item, {})
        if wrong := sorted(name for name in {*own, *expected} if own.get(name) != expected.get(name)):
            more = f" and {len(wrong) - 1} more" * (len(wrong) > 1)
            raise UserError(f"{path}: damaged: {wrong[0]}{more} is not what was saved")
    return found


def _checkpointer_of_this_host() -> ocp.Checkpointer:
    """Reads without the other hosts, for whom Orbax would wait."""
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(own, {own}, barrier_sync_key_prefix=f"host{own}")
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone)


def _read_checksums(workdir: epath.PathLike, step: int) -> dict | None:
    """Checksums by item and array; None if the checkpoint is from before there were any."""
    path = folder_of(workdir) / str(step) / CHECKSUMS_FILE
    if not path.exists():
        return None
    saved = read_json(path, dict[str, dict[str, int]])
    if "params" not in saved:
        raise UserError(f"{path}: damaged")
    return saved


def _with_checksums(items: dict) -> ocp.args.Composite:
    """Returns what to save: the items and their checksums."""
    sums = {item: checksums.of_tree(tree) for item, tree in items.items()}
    to_save = {item: ocp.args.StandardSave(tree) for item, tree in items.items()}
    return ocp.args.Composite(**to_save, checksums=ocp.args.JsonSave(sums))


def write_params(workdir: epath.PathLike, params: dict) -> None:
    """Writes params alone as the checkpoint of step 0, to initialize from or predict with, but not to resume."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder_of(workdir) / "0", args=_with_checksums({"params": params}))
