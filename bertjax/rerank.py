"""Runs `bertjax rerank`, as `python -m bertjax.rerank`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("bertjax.cli.rerank", run_name="__main__", alter_sys=True)
