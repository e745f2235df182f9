"""Checkpoints of a run, with Orbax: written in the background, the latest few and the best one kept."""

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from bertjax.config import UserError
from bertjax.training.state import TrainState

FOLDER = "checkpoints"


def folder_of(workdir: epath.PathLike) -> epath.Path:
    """`WORKDIR/checkpoints`, absolute as Orbax wants it."""
    folder = epath.Path(workdir) / FOLDER
    return folder if "://" in str(workdir) else folder.absolute()


def steps(workdir: epath.PathLike) -> list[int]:
    """The steps of the finished checkpoints of a run, rising."""
    folder = folder_of(workdir)
    return sorted(ocp.utils.checkpoint_steps(folder)) if folder.exists() else []


class Checkpoints:
    """The checkpoints in `WORKDIR/checkpoints/STEP`. Params lie apart from the rest, so that they can be read alone."""

    def __init__(self, workdir: epath.PathLike, keep: int):
        policy = AnyPreservationPolicy(
            [
                LatestN(keep),
                BestN(get_metric_fn=lambda m: m["score"], n=1, keep_checkpoints_without_metrics=False),
            ]
        )
        self._manager = ocp.CheckpointManager(
            folder_of(workdir),
            options=ocp.CheckpointManagerOptions(preservation_policy=policy, cleanup_tmp_directories=True),
        )

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, score: float | None = None) -> None:
        """Begins to save; returns as soon as the arrays are copied. `score`: higher is better."""
        rest = {"step": state.step, "opt_state": state.opt_state}
        self._manager.save(
            step,
            args=ocp.args.Composite(params=ocp.args.StandardSave(state.params), rest=ocp.args.StandardSave(rest)),
            metrics=None if score is None else {"score": score},
            force=True,  # when to save is the loop's to say
        )

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

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()


def read_params(workdir: epath.PathLike) -> dict:
    """The params of a run's latest checkpoint, as NumPy arrays. Raises `UserError` where there is none."""
    found = steps(workdir)
    if not found:
        raise UserError(f"no finished checkpoint in {epath.Path(workdir) / FOLDER}")
    path = folder_of(workdir) / str(found[-1]) / "params"
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
