"""Runs `bertjax search`, as `python -m bertjax.search`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.search", run_name="__main__", alter_sys=True)
