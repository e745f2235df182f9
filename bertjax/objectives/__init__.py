"""Objectives of pre-training: one module each, and the model that learns a sum of them."""

from bertjax.objectives.objective import Objective, Plot, Statistics
from bertjax.objectives.parsing import learn
from bertjax.objectives.registry import register

__all__ = ["Objective", "Plot", "Statistics", "learn", "register"]
