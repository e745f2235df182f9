"""Training: the loop and its hooks, the compiled step, its state, optimizers, checkpoints, trackers and monitoring."""
