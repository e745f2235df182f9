"""Fine-tuning of checkpoints on labelled data."""

from bertjax.inference.task import FineTuningTask, InputForm, Split, TaskData
from bertjax.inference.tasks import register

__all__ = ["FineTuningTask", "InputForm", "Split", "TaskData", "register"]
