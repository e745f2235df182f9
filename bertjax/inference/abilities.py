"""The abilities of a checkpoint: the functions here return the task of a checkpoint and the methods of this task.

The library, the commands, the server, the exports and the report call these functions.
"""

from typing import TypeVar

from bertjax.common.errors import UserError
from bertjax.inference.task import FineTuningTask, HasEmbeddings, HasSubmission, ReadsLabelledFiles
from bertjax.inference.tasks import find_task
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.models.family import Decodes

Ability = TypeVar("Ability")

# The requirement of an ability, for the message about a checkpoint without the ability.
REQUIREMENTS: dict[type, str] = {
    HasEmbeddings: (
        "must compute embeddings: choose the workdir of a run of embed, or a folder of sentence-transformers"
    ),
    HasSubmission: "must be the workdir of a run on a benchmark that takes submissions",
    ReadsLabelledFiles: (
        "must be the workdir of a run that classifies texts, tags words, answers questions or computes embeddings; the "
        "task determines how --data is read"
    ),
}


def task_of(source: Pretrained) -> FineTuningTask | None:
    """Returns the fine-tuning task of a checkpoint; None if the checkpoint is not fine-tuned.

    Raises:
      UserError: if the task is not registered, or if the checkpoint has no weights for the head.
    """
    task = find_task(source.settings, source.architecture)
    if task is not None:
        task.check_weights(source)
    return task


def require_task(source: Pretrained) -> FineTuningTask:
    """Returns the fine-tuning task of a checkpoint.

    Raises:
      UserError: if the checkpoint is not fine-tuned, or if `task_of` raises an error.
    """
    if (task := task_of(source)) is None:
        raise UserError(f"{source.path}: is not fine-tuned; choose the checkpoint of a run with a task")
    return task


def find_ability(source: Pretrained, ability: type[Ability]) -> Ability | None:
    """Returns the task of a checkpoint if the task has an ability, such as `HasEmbeddings`; else None."""
    task = task_of(source)
    return task if isinstance(task, ability) else None


def require_ability(source: Pretrained, ability: type[Ability]) -> Ability:
    """Returns the task of a checkpoint, which must have an ability.

    Raises:
      UserError: if the task lacks the ability, or if `task_of` raises an error.
    """
    if (task := find_ability(source, ability)) is None:
        raise UserError(f"{source.path}: {REQUIREMENTS[ability]}")
    return task


def methods_of(source: Pretrained) -> list[str]:
    """Returns the names of the methods of `bertjax.Model` that use the head of a checkpoint."""
    if (task := task_of(source)) is not None:
        return [*filter(None, [task.method]), "predict"]
    if not source.predicts_words:
        return []
    family = families.family_of(source.config)
    lm_type = family.lm_type(source.config)
    if lm_type in ("masked", "permuted"):
        return ["fill_mask"]
    return ["generate"] if lm_type == "causal" and isinstance(family, Decodes) else []
