"""Runs `bertjax extract`, as `python -m bertjax.extract`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.extract", run_name="__main__", alter_sys=True)
