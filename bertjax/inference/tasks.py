"""The registry of tasks.

A task is `pretraining`, or a fine-tuning task: the `TASK` of each module in `finetuning/tasks/`, the `TASK` of
`embedding` and of `reranking`, and the tasks that users register. The registry holds only names; `get` imports the
module of a task.
"""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry, own_in
from bertjax.inference.task import FineTuningTask

PRETRAINING = "pretraining"
_FOLDER = "bertjax.finetuning.tasks"
_FILE = pathlib.Path(__file__).parents[1] / "finetuning/tasks/__init__.py"
_MODULES = (
    # `find_task` chooses the first task with an architecture. These two tasks are first, because other tasks have the
    # same architectures.
    {name: f"{_FOLDER}.{name}:TASK" for name in ("classify", "tag")}
    | own_in(_FOLDER, str(_FILE), "TASK")
    | {"embed": "bertjax.embedding.task:TASK", "rerank": "bertjax.reranking.task:TASK"}
)
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
    return next((task for _, task in loadable() if architecture == task.architecture != ""), None)


def loadable() -> Iterator[tuple[str, FineTuningTask]]:
    """Yields the names and the tasks of the registry, without entry points that do not load."""
    for name in names():
        with contextlib.suppress(UserError):
            yield name, get(name)
