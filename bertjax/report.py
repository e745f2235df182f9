"""Runs `bertjax report`, as `python -m bertjax.report`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.report", run_name="__main__", alter_sys=True)
