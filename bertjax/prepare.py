"""Runs `bertjax prepare`, as `python -m bertjax.prepare`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.prepare", run_name="__main__", alter_sys=True)
