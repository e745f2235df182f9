"""Runs `bertjax predict`, as `python -m bertjax.predict`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.predict", run_name="__main__", alter_sys=True)
