"""The registry of tasks.

A task is `pretraining`, or a fine-tuning task: a module with a `TASK`. The registry holds only names; `get` imports the
module of a task.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry
from bertjax.inference.task import FineTuningTask

PRETRAINING = "pretraining"
FINE_TUNING = ("glue", "classify", "squad", "ner", "tag", "swag", "features", "embed")
_MODULES = {name: f"bertjax.finetuning.tasks.{name}:TASK" for name in FINE_TUNING} | {
    "embed": "bertjax.embedding.task:TASK"
}
TASKS = Registry[FineTuningTask]("task", "task", _MODULES, reserved=(PRETRAINING,), base=FineTuningTask)
register, names, get = TASKS.register, TASKS.names, TASKS.get  # The file of an experiment may register a task.


def find_task(settings: Mapping[str, Any], architecture: str) -> FineTuningTask | None:
    """Returns the fine-tuning task of a checkpoint; None if the checkpoint is not fine-tuned.

    Args:
      settings: the config of the run; empty for other formats.
      architecture: the transformers class. Without the config of a run, the first task with this class is the task.

    Raises:
      UserError: if the task of the run is not registered.
    """
    name = settings.get("task", "")
    if name and name != PRETRAINING:
        return get(name)
    for known in names() if architecture else ():
        with contextlib.suppress(UserError):  # an entry point that does not load
            if (task := get(known)).architecture == architecture:
                return task
    return None
