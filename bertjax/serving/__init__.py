"""The HTTP server of a checkpoint, with a page for trying it."""
