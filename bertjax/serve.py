"""Runs `bertjax serve`, as `python -m bertjax.serve`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.serve", run_name="__main__", alter_sys=True)
