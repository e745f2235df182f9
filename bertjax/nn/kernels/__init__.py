"""Pallas kernels: attention, norms and activations for TPUs and GPUs."""
