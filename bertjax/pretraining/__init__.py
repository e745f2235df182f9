"""Pre-training: the task, its run, its scores, adaptation of checkpoints."""
