"""Objectives of pre-training: one module each."""

from bertjax.objectives.parsing import Objective, Plot, Statistics, learn, register

__all__ = ["Objective", "Plot", "Statistics", "learn", "register"]
