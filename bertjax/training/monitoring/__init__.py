"""Measures of a run: the wall time of its parts, metrics and progress, and the memory of a step."""
