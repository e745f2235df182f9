"""Monitors a run: the wall time of its parts, the metrics, the progress, and the memory of a step."""
