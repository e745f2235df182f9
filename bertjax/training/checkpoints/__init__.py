"""Checkpoints, and the files of a workdir."""
