"""Runs `bertjax submit`, as `python -m bertjax.submit`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.submit", run_name="__main__", alter_sys=True)
