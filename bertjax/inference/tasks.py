"""The registry of tasks: `pretraining`, and the fine-tuning tasks, each a module with a `TASK`.

The registry holds only names; `get` imports the module of a task.
"""

import contextlib
from typing import TYPE_CHECKING

from bertjax.common.errors import UserError
from bertjax.common.registry import Registry
from bertjax.pretraining.validate import validate_fine_tuning, validate_pretraining

if TYPE_CHECKING:
    from bertjax.finetuning.task import FineTuningTask

PRETRAINING = "pretraining"
FINE_TUNING = ("glue", "classify", "squad", "ner", "tag", "swag", "features", "embed")
_MODULES = {name: f"bertjax.finetuning.tasks.{name}:TASK" for name in FINE_TUNING} | {
    "embed": "bertjax.embedding.task:TASK"
}
TASKS: "Registry[FineTuningTask]" = Registry("task", "task", _MODULES, reserved=(PRETRAINING,))
register, names, get = TASKS.register, TASKS.names, TASKS.get  # an experiment's file may register a task of its own


def of_checkpoint(name: str, architecture: str) -> "FineTuningTask | None":
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


def validate(config, with_data: bool = True, is_adopted: bool = False) -> None:
    """Checks a config without touching files or devices. Raises `UserError` with field, value and remedy.

    Args:
      with_data: also require the location of the data.
      is_adopted: with `adapt.model`, whether `config.model` is that of `init_checkpoint` by now.
    """
    from bertjax.objectives.validate import validate as validate_objectives
    from bertjax.training.optim import optimizers, schedules
    from bertjax.training.trackers import trackers

    if config.task == PRETRAINING:
        validate_pretraining(config, with_data)
        validate_objectives(config, with_model=is_adopted or not config.adapt.model)
        if config.recipe:
            from bertjax.launch.budget import recipes

            recipes.prepared(config)
    else:
        task = get(config.task)
        validate_fine_tuning(config, with_data)
        task.validate(config)
    schedules.validate(config)
    trackers.validate(config)
    optimizers.validate(config.optimizer)
