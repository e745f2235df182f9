"""Muon of optax (Jordan 2024): orthogonalizes the updates of the encoder's kernels; Adam updates the other params."""

import functools
from typing import Any

import jax
import optax.contrib
from ml_collections import ConfigDict

from bertjax.distributed.rules import stacked_axes
from bertjax.training.optim import from_optax


def muon(config: ConfigDict, axes: dict) -> list[optax.GradientTransformation]:
    """Returns the transformations of Muon. Each matrix of a stacked array is orthogonalized separately.

    Adam updates the embeddings, and the kernels with an unnamed logical axis (heads and LSTMs).
    """
    factory = functools.partial(
        optax.contrib.muon,
        muon_weight_dimension_numbers=jax.tree_util.tree_map_with_path(_dimensions, axes),
        **from_optax.parse_options(config.options, optax.contrib.muon),
    )
    return from_optax.transformations_of(config, factory)


def _dimensions(path: tuple, axes: Any) -> optax.contrib.MuonDimensionNumbers | None:
    """Returns the input axes and the output axes of a kernel; None if Adam updates the param."""
    matrix_axes = [axis for axis in range(len(axes)) if axis not in stacked_axes(axes)]
    if path[-1].key != "kernel" or len(matrix_axes) < 2 or any(axes[axis] is None for axis in matrix_axes):
        return None
    # `embed` is either the first axis and the only input axis, or the last axis and the only output axis.
    inputs = 1 if axes[matrix_axes[0]] == "embed" else len(matrix_axes) - 1
    return optax.contrib.MuonDimensionNumbers(tuple(matrix_axes[:inputs]), tuple(matrix_axes[inputs:]))
