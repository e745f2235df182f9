"""Runs the unchanged create_pretraining_data.py of a google-research/bert checkout with TensorFlow 2."""

import os
import sys

from bertjax.common.errors import UserError
from experiments.benchmarks.processes import Cost, run

SCRIPT = "create_pretraining_data.py"

# Google's script needs TensorFlow 1. TensorFlow 2 still has its names.
UNDER_TENSORFLOW_1 = """
import runpy, sys
import tensorflow.compat.v1
sys.modules["tensorflow"] = tensorflow.compat.v1
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def create(folder: str, **flags) -> Cost:
    """Runs Google's script of the checkout in `folder` with the flags of the script. Raises `UserError` if it fails."""
    script = os.path.join(folder, SCRIPT)
    if not os.path.exists(script):
        raise UserError(f"{folder}: no {SCRIPT} in it; give a checkout of google-research/bert")
    flags = [f"--{name}={value}" for name, value in flags.items()]
    return run([sys.executable, "-c", UNDER_TENSORFLOW_1, script, *flags], PYTHONPATH=folder)
