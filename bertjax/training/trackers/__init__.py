"""Trackers of metrics: metrics.jsonl, TensorBoard, MLflow, Weights & Biases."""
