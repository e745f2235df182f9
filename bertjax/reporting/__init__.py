"""Shows runs: the page about runs, the curves, the attention of a checkpoint, and the list of the runs in a folder."""
