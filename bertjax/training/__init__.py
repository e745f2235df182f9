"""Training: the loop, the compiled step, its state, optimizers, checkpoints, trackers and monitoring."""
