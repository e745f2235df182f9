"""Runs `bertjax train`, as `python -m bertjax.main`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.train", run_name="__main__", alter_sys=True)
