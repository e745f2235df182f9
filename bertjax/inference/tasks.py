"""The registry of tasks, and the task of a checkpoint.

A task is `pretraining`, or a fine-tuning task: a module with a `TASK`. The registry holds only names; `get` imports the
module of a task. The registry stands in this room because the task of a checkpoint determines its use.
"""

import contextlib
from typing import Any

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry

PRETRAINING = "pretraining"
FINE_TUNING = ("glue", "classify", "squad", "ner", "tag", "swag", "features", "embed")
_MODULES = {name: f"bertjax.finetuning.tasks.{name}:TASK" for name in FINE_TUNING} | {
    "embed": "bertjax.embedding.task:TASK"
}
# Each is a `finetuning.task.FineTuningTask`, an interface in a room above this one.
TASKS: Registry[Any] = Registry("task", "task", _MODULES, reserved=(PRETRAINING,))
register, names, get = TASKS.register, TASKS.names, TASKS.get  # an experiment's file may register a task of its own


def of_checkpoint(name: str, architecture: str) -> Any | None:
    """Returns the task of a checkpoint: by its name if known, otherwise the first task with its architecture.

    Returns None if it is not a fine-tuned checkpoint. Raises `UserError` if its task is not registered.
    """
    if name and name != PRETRAINING:
        return get(name)
    for known in names() if architecture else ():
        with contextlib.suppress(UserError):  # an entry point that does not load
            if (task := get(known)).architecture == architecture:
                return task
    return None
