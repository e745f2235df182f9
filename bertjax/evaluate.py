"""Runs `bertjax evaluate`, as `python -m bertjax.evaluate`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.evaluate", run_name="__main__", alter_sys=True)
