"""Selects the frozen params, and computes the learning rate factors of the layers (`optimizer.layer_decay`).

Params are frozen by the task, by a learning rate factor of 0 in `optimizer.groups`, or by `freeze_layers`, which counts
layers from the input. Frozen params have no gradient, no moments and no weight decay. The global gradient norm excludes
frozen params.
"""

from collections.abc import Mapping

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.training.optim import groups
from bertjax.training.task import Task

# Path of a param -> None if the whole array is frozen, or n if the first n layers of an array `[layers, ...]` are
# frozen. Trainable params have no entry.
Frozen = Mapping[tuple[str, ...], int | None]


def find_frozen(task: Task, config: ConfigDict, params: dict) -> Frozen:
    """Returns the frozen params of a task.

    Args:
      task: the task, which may freeze params.
      config: the whole config.
      params: the params, or a tree of the same structure, such as the logical axes.

    Raises:
      UserError: a group matches no param, two groups match a param, the model has fewer layers than `freeze_layers`, or
        all params are frozen.
    """
    groups.check_params(config.optimizer, params)
    paths, freeze_layers = flatten_dict(params), config.freeze_layers
    if freeze_layers > (number_of_layers := _number_of_layers(task, params)):
        raise UserError(
            f"config.freeze_layers = {freeze_layers}: must be at most {number_of_layers}, the number of layers"
        )
    frozen: dict[tuple[str, ...], int | None] = {}
    for path in paths:
        layer_ids = task.layer_ids(path)
        is_below = np.atleast_1d(False if layer_ids is None or not freeze_layers else layer_ids <= freeze_layers)
        factor = groups.learning_rate_factor_of(config.optimizer, tuple(map(jax.tree_util.DictKey, path)))
        if is_below.all() or task.is_frozen(path) or factor == 0:
            frozen[path] = None
        elif is_below.any():
            frozen[path] = int(is_below.sum())
    if all(frozen.get(path, 0) is None for path in paths):
        raise UserError("config.optimizer.groups: all params are frozen; set a learning_rate_factor above 0")
    return frozen


def layer_factors(task: Task, decay: float, params: dict, trainable: dict, frozen: Frozen) -> dict:
    """Returns the factors of the updates for layer-wise learning rate decay (Sun et al. 2019, section 5.3.4).

    The factor of layer i of L is `decay ** (L - i)`; the embeddings are layer 0. Params after the layers, such as a
    head, have the factor 1.

    Args:
      task: the task, which numbers the layers.
      decay: `optimizer.layer_decay`.
      params: all params, or a tree of the same structure.
      trainable: the trainable params, or their shapes.
      frozen: the frozen params.

    Returns:
      A tree with the structure of `trainable`: a scalar, or an array `[layers, 1, ...]` for an array of stacked layers.

    Raises:
      UserError: no param has a layer number.
    """
    if not (number_of_layers := _number_of_layers(task, params)):
        raise UserError(
            f"config.optimizer.layer_decay = {decay}: the model family does not number layers; set layer_decay=1"
        )
    factors = {}
    for path, x in flatten_dict(trainable).items():
        layer_ids = task.layer_ids(path)
        factor = np.asarray(1 if layer_ids is None else decay ** (number_of_layers - layer_ids), np.float32)
        if factor.ndim:
            factor = factor[frozen.get(path, 0) :].reshape(-1, *[1] * (x.ndim - 1))
        factors[path] = factor
    return unflatten_dict(factors)


def _number_of_layers(task: Task, params: dict) -> int:
    """Returns the number of layers of the model; 0 if no param has a layer number."""
    layer_ids = map(task.layer_ids, flatten_dict(params))
    return max((int(np.max(ids)) for ids in layer_ids if ids is not None), default=0)
