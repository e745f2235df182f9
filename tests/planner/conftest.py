import pytest

from tests.conftest import without_compilation_cache


@pytest.fixture(autouse=True, scope="package")
def no_compilation_cache():
    with without_compilation_cache():
        yield
