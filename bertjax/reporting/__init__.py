"""Shows runs: the page about a run, its curves, the attention of its checkpoint, and the runs in a folder."""
