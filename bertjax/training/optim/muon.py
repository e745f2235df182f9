"""Muon of optax (Jordan 2024): orthogonalizes the updates of the encoder's matrices; Adam takes the other params."""

import functools

import jax
import optax.contrib

from bertjax.distributed.rules import stacked
from bertjax.training.optim import from_optax


def muon(config, axes) -> list:
    """Orthogonalizes each of the matrices of an array by itself.

    Embeddings, and kernels with an unnamed axis, which are those of output layers and LSTMs, are Adam's.
    """
    made = functools.partial(
        optax.contrib.muon,
        muon_weight_dimension_numbers=jax.tree_util.tree_map_with_path(_dimensions, axes),
        **from_optax.parse(config.options, optax.contrib.muon),
    )
    return from_optax.updates_of(config, made)


def _dimensions(path, axes) -> optax.contrib.MuonDimensionNumbers | None:
    """Returns the axes of a kernel's inputs and of its outputs, one of which is `embed`; None: the param is Adam's."""
    own = [axis for axis in range(len(axes)) if axis not in stacked(axes)]
    if path[-1].key != "kernel" or len(own) < 2 or any(axes[axis] is None for axis in own):
        return None
    inputs = 1 if axes[own[0]] == "embed" else len(own) - 1
    return optax.contrib.MuonDimensionNumbers(tuple(own[:inputs]), tuple(own[inputs:]))
