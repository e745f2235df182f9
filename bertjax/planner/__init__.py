"""Compiles a config for TPUs or GPUs without the hardware: memory, time, cost."""
