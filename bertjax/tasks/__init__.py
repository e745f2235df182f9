"""The registry of tasks: `pretraining`, and the fine-tuning tasks, each a module with a `TASK`.

The registry holds only names; `get` imports the module of a task.
"""

import contextlib
import importlib
import importlib.metadata
from typing import TYPE_CHECKING

from bertjax.config import UserError
from bertjax.validation import validate_fine_tuning, validate_pretraining

if TYPE_CHECKING:
    from bertjax.tasks.finetuning import FineTuningTask

PRETRAINING = "pretraining"
FINE_TUNING = ("glue", "classify", "squad", "ner", "tag", "swag", "features")
ENTRY_POINTS = "bertjax.tasks"  # group in which installed packages register tasks
_registered: dict[str, "FineTuningTask"] = {}


def register(name: str, task: "FineTuningTask") -> None:
    """Registers a task in this process, for `config.task = name`; an experiment's file may call this."""
    if name in (PRETRAINING, *FINE_TUNING):
        raise UserError(f"task {name!r} is one of bertjax's own; register yours under another name")
    _registered[name] = task


def names() -> tuple[str, ...]:
    """Returns the names of all fine-tuning tasks."""
    installed = (point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))
    return tuple(dict.fromkeys((*FINE_TUNING, *_registered, *installed)))


def get(name: str) -> "FineTuningTask":
    """Returns a fine-tuning task. Raises `UserError` if the name is not in `names()`."""
    if name in _registered:
        return _registered[name]
    if name in FINE_TUNING:
        return importlib.import_module(f"bertjax.tasks.{name}").TASK
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        try:
            return point.load()
        except Exception as error:  # of somebody else's code
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"task {name!r}: cannot load {point.value}, its entry point ({reason})") from None
    raise UserError(f"config.task = {name!r}: choose one of {', '.join((PRETRAINING, *names()))}")


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


def validate(config, with_data: bool = True) -> None:
    """Checks a config without touching files or devices. Raises `UserError` with field, value and remedy.

    `with_data`: also require the location of the data.
    """
    if config.task == PRETRAINING:
        validate_pretraining(config, with_data)
    else:
        task = get(config.task)
        validate_fine_tuning(config, with_data)
        task.validate(config)
