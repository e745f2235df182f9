"""What BERT learns: `pretraining`, and the tasks that it is fine-tuned for, each of them one module with a `TASK`.

This registry knows names only. A task's module is imported when somebody asks for it.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING

from bertjax.config import UserError
from bertjax.validation import validate_fine_tuning, validate_pretraining

if TYPE_CHECKING:
    from bertjax.tasks.finetuning import FineTuningTask

PRETRAINING = "pretraining"
FINE_TUNING = ("glue", "classify", "squad", "ner", "tag", "swag", "features")
ENTRY_POINTS = "bertjax.tasks"  # under which an installed package names tasks of its own, for all commands
_registered: dict[str, "FineTuningTask"] = {}


def register(name: str, task: "FineTuningTask") -> None:
    """Makes a task known in this process, as `config.task = name`; an experiment's file may do it."""
    _registered[name] = task


def names() -> tuple[str, ...]:
    """Of all fine-tuning tasks."""
    installed = (point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))
    return tuple(dict.fromkeys((*FINE_TUNING, *_registered, *installed)))


def get(name: str) -> "FineTuningTask":
    """Raises `UserError` for a name that is not in `names()`."""
    if name in _registered:
        return _registered[name]
    if name in FINE_TUNING:
        return importlib.import_module(f"bertjax.tasks.{name}").TASK
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        return point.load()
    raise UserError(f"config.task = {name!r}: choose one of {', '.join((PRETRAINING, *names()))}")


def of_checkpoint(name: str, architecture: str) -> "FineTuningTask | None":
    """The task of a checkpoint: the one that it was trained for, or else the first with its output layer.

    None where it has no output layer of a task. Raises `UserError` where it is of a task that nobody has registered.
    """
    if name and name != PRETRAINING:
        return get(name)
    return next((task for task in map(get, names()) if task.architecture == architecture), None)


def validate(config, with_data: bool = True) -> None:
    """Checks what can be known without touching a file or a device. Raises `UserError`: field, value, remedy.

    `with_data`: the config also has to say where its data are.
    """
    if config.task == PRETRAINING:
        validate_pretraining(config, with_data)
    else:
        task = get(config.task)
        validate_fine_tuning(config, with_data)
        task.validate(config)
