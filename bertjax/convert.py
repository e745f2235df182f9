"""Runs `bertjax convert`, as `python -m bertjax.convert`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.convert", run_name="__main__", alter_sys=True)
