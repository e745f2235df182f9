"""Compiles a config for TPUs or GPUs that are not there: memory, time, cost."""
