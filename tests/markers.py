"""Cases of parametrized tests that are not in the default tier."""

import pytest


def slow_case(*values):
    """Returns a case for `pytest.mark.parametrize` with the marker `slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)
