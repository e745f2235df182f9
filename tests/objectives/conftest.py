from tests.tasks.conftest import on_one_device  # noqa: F401
