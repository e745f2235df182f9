"""Runs `bertjax runs`, as `python -m bertjax.runs`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.runs", run_name="__main__", alter_sys=True)
