from tests.checkpoints import checkpoint, on_one_device, runs_on_one_device  # noqa: F401
