"""Named tensors of somebody else's checkpoint, which a family reads."""

import re
from collections.abc import Mapping

import numpy as np

from bertjax.config import UserError

WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # DataParallel, torch.compile: put in front of all names


def take(named: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...], source: str, kind: str) -> np.ndarray:
    """Returns a tensor as float32. Raises `UserError` if it is missing, of another shape, or quantized.

    Args:
      source: the checkpoint, and `kind` what it should be of: "a GPT-2".
    """
    if name not in named:
        raise UserError(f"{source}: {name} is missing; is the checkpoint complete, and {kind}?")
    if named[name].shape != shape:
        raise UserError(f"{source}: {name} has shape {named[name].shape}, but its config says {shape}")
    if named[name].dtype.kind in "iub":
        raise UserError(f"{source}: {name} is of type {named[name].dtype}; quantized weights are not supported")
    return named[name].astype(np.float32)
