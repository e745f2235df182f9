# `python -m bertjax.extract` is `bertjax extract`.
import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.extract", run_name="__main__", alter_sys=True)
