"""Clocks, printed metrics, the check of divergence, profiles, and the memory of a step."""
