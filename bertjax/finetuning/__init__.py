"""Fine-tuning of checkpoints on labelled data."""

from bertjax.finetuning.task import Dataset, FineTuningTask, InputForm, Split
from bertjax.inference.tasks import register

__all__ = ["Dataset", "FineTuningTask", "InputForm", "Split", "register"]
