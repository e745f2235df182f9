"""Trackers of metrics: metrics.jsonl, TensorBoard, MLflow, Weights & Biases, and registered trackers."""

from bertjax.training.trackers.trackers import Tracker, register

__all__ = ["Tracker", "register"]
