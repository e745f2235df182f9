"""The benchmark of planted faults plants its faults in the current source."""

import tomllib

import pytest

from tests.pages import ROOT

FAULTS = tomllib.loads((ROOT / "experiments/benchmarks/planted_faults.toml").read_text())["fault"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_the_line_of_a_fault_occurs_once(fault):
    assert (ROOT / fault["file"]).read_text().count(fault["line"]) == 1
