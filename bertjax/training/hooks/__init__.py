"""Hooks of the training loop: the base class, the hooks that every run has, and hooks that a user registers."""

from bertjax.training.hooks.hook import Hook, TrainingRun
from bertjax.training.hooks.registry import register

__all__ = ["Hook", "TrainingRun", "register"]
