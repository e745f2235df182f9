# `python -m bertjax.search` is `bertjax search`.
import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.search", run_name="__main__", alter_sys=True)
