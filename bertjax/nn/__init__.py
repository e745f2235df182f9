"""Layers of encoders, the operations that layers are made of (`ops`), and kernels for TPUs and GPUs (`kernels`)."""
