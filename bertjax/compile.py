"""Runs `bertjax compile`, as `python -m bertjax.compile`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.compile", run_name="__main__", alter_sys=True)
