"""Runs `bertjax doctor`, as `python -m bertjax.doctor`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.doctor", run_name="__main__", alter_sys=True)
