"""Runs `bertjax mine`, as `python -m bertjax.mine`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.mine", run_name="__main__", alter_sys=True)
