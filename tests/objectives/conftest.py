from tests.checkpoints import on_one_device  # noqa: F401
