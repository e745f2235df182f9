"""A checkpoint behind HTTP, with a page to try it."""
