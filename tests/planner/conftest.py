import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def no_compilation_cache():
    """What is compiled for a TPU that is not there can be written to the cache, but not be read."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
