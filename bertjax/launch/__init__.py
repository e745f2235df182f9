"""Starts a run of any kind on all hosts."""
