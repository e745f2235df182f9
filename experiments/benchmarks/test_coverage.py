"""Measures which lines of the package each test executes, processes included.

Command:  python -m experiments.benchmarks.test_coverage --output=FILE [ARGUMENTS OF PYTEST]
          such as `-n 3 --dist loadfile -m ''`
Needs:    pip install -e '.[test]' coverage
Results:  RESULTS.md, "The tests"; FILE, a data file of coverage.py whose contexts are the node ids of the tests, is an
          input of planted_faults.py

A fixture of a module or of the session counts for the first test that uses it. The processes that `tests/processes.py`
forks are measured. The processes that start a fresh Python are not measured.
"""

import argparse
import atexit
import os
import pathlib
import subprocess
import sys

import coverage
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUTPUT = "BERTJAX_TEST_COVERAGE"  # environment variable: the data file; tests/processes.py reads the variable


def measurement(context: str | None = None) -> coverage.Coverage:
    """Returns a measurement of the package in this process, with a separate data file."""
    options = dict(source=[str(ROOT / "bertjax")], config_file=False)
    return coverage.Coverage(os.environ[OUTPUT], data_suffix=True, context=context, **options)


def start_in_fork() -> None:
    """Measures this process until its exit, for the test that started the process."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    measured = measurement(context=test or None)
    measured.start()
    atexit.register(lambda: (measured.stop(), measured.save()))


class Plugin:
    """Measures a pytest process."""

    def __init__(self):
        self.measured = measurement()
        self.measured.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self.measured.switch_context(item.nodeid)
        yield
        self.measured.switch_context("")

    def pytest_sessionfinish(self):
        self.measured.stop()
        self.measured.save()


def pytest_load_initial_conftests(early_config) -> None:  # before any import of the package
    if "PYTEST_XDIST_WORKER" in os.environ or not early_config.known_args_namespace.numprocesses:
        early_config.pluginmanager.register(Plugin())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, type=pathlib.Path, help="data file to write")
    arguments, for_pytest = parser.parse_known_args()
    output = arguments.output.absolute()
    # With `-p`, the workers would import the plugin after `conftest.py`.
    environment = {**os.environ, OUTPUT: str(output), "PYTEST_PLUGINS": "experiments.benchmarks.test_coverage"}
    done = subprocess.run([sys.executable, "-m", "pytest", *for_pytest], env=environment, cwd=ROOT)
    combined = coverage.Coverage(str(output), config_file=False)
    combined.combine([str(output.parent)])
    combined.save()
    combined.report(show_missing=False, skip_covered=True)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
