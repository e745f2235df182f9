"""Trackers of metrics: metrics.jsonl, TensorBoard, MLflow, Weights & Biases, or one that a user registers."""

from bertjax.training.trackers.trackers import Tracker, register

__all__ = ["Tracker", "register"]
