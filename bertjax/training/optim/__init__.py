"""Optimizers, learning rate schedules, and frozen parameters."""
