"""A checkpoint behind HTTP: `batches` computes what many requests ask for together, `http` talks to them, `page` is for
people."""
