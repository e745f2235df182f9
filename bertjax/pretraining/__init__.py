"""Pre-training: its task, its run, its scores, and the adaptation of a checkpoint to new text."""
