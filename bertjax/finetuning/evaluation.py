"""Scores a checkpoint on a labelled file, without training."""

from collections.abc import Callable
from typing import Any

from bertjax.common.errors import UserError
from bertjax.finetuning.run import score
from bertjax.inference.abilities import REQUIREMENTS, require_ability
from bertjax.inference.task import ReadsLabelledFiles
from bertjax.interop.pretrained import Pretrained
from bertjax.training.scores import Scores


def score_file(
    source: Pretrained,
    path: str,
    on_note: Callable[[str], None],
    task: ReadsLabelledFiles | None = None,
    **flags: Any,
) -> Scores:
    """Scores a checkpoint on a labelled file that has the format of the run's dev set.

    Args:
      source: the checkpoint.
      path: the file, or a folder for embeddings.
      on_note: receives the lines about the examples before the checkpoint is scored, and a remark on the scores.
      task: the task that reads the file; None for the task of the checkpoint.
      **flags: the description of the file, see `ReadsLabelledFiles.reading_flags`; None for unset flags.

    Raises:
      UserError: if the checkpoint does not determine how the file is read, or if the file is invalid.
    """
    task = task or require_ability(source, ReadsLabelledFiles)
    if not source.settings.get("task") and not task.reading_flags:  # Only a run stores the format of the data.
        raise UserError(f"{source.path}: {REQUIREMENTS[ReadsLabelledFiles]}")
    set_flags = {name: value for name, value in flags.items() if value is not None}
    if wrong := next((name for name in set_flags if name not in task.reading_flags), None):
        raise UserError(
            f"--{wrong}={set_flags[wrong]}: the files of this checkpoint's task need no such flag; leave the flag out"
        )
    split = task.read_labelled(source, path, **set_flags)
    if split.note:
        on_note(split.note)
    scores = score(source, split)
    if remark := split.remark(scores.scores):
        on_note(remark)
    return scores
