"""Runs `bertjax vocabulary`, as `python -m bertjax.vocabulary`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.vocabulary", run_name="__main__", alter_sys=True)
