"""Selects the frozen params and computes the learning rate factors of the layers (`optimizer.layer_decay`).

The task freezes params, `optimizer.groups` freezes them with a learning rate factor of 0, and `freeze_layers` freezes
the first layers. Frozen params have no gradient, no moments and no weight decay. The norm of the gradients does not
include them.
"""

from collections.abc import Mapping

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.training.optim import groups
from bertjax.training.task import Task

# Path of a param -> the number of frozen layers at the start of an array that stacks layers, or None if the whole array
# is frozen. Trainable params have no entry.
Frozen = Mapping[tuple[str, ...], int | None]


def find_frozen(task: Task, config: ConfigDict, params: dict) -> Frozen:
    """Returns the frozen params of a task.

    Args:
      task: the task, which may freeze params.
      config: the whole config.
      params: the params, or a tree of the same form such as the axes.

    Raises:
      UserError: a group has no params, the model has fewer layers than `freeze_layers`, or all params are frozen.
    """
    groups.check_params(config.optimizer, params)
    paths, freeze_layers = flatten_dict(params), config.freeze_layers
    if freeze_layers > (top := _top_layer(task, params)):
        raise UserError(f"config.freeze_layers = {freeze_layers}: the model has {top} layers")
    frozen: dict[tuple[str, ...], int | None] = {}
    for path in paths:
        numbers = task.layer_ids(path)
        is_below = np.atleast_1d(False if numbers is None or not freeze_layers else numbers <= freeze_layers)
        factor = groups.factor_of(config.optimizer, tuple(map(jax.tree_util.DictKey, path)))
        if is_below.all() or task.is_frozen(path) or factor == 0:
            frozen[path] = None
        elif is_below.any():
            frozen[path] = int(is_below.sum())
    if all(frozen.get(path, 0) is None for path in paths):
        raise UserError("config.optimizer.groups: their learning rates of 0 leave nothing to train")
    return frozen


def layer_factors(task: Task, decay: float, params: dict, trainable: dict, frozen: Frozen) -> dict:
    """Returns the factors of the updates for layer-wise learning rate decay (Sun et al. 2019, section 5.3.4).

    The factor of layer i of L is `decay ** (L - i)`; the embeddings are layer 0. Params after the layers, such as a
    head, have the factor 1.

    Args:
      task: the task, which numbers the layers.
      decay: `optimizer.layer_decay`.
      params: all params, or a tree of the same form.
      trainable: the trainable params, or their shapes.
      frozen: the frozen params.

    Returns:
      A tree like `trainable`; the factors of an array of stacked layers broadcast against it.

    Raises:
      UserError: no param has a layer number.
    """
    if not (top := _top_layer(task, params)):
        raise UserError(f"config.optimizer.layer_decay = {decay}: the model's family names no layers of its params")
    factors = {}
    for path, x in flatten_dict(trainable).items():
        numbers = task.layer_ids(path)
        factor = np.asarray(1 if numbers is None else decay ** (top - numbers), np.float32)
        if factor.ndim:
            factor = factor[frozen.get(path, 0) :].reshape(-1, *[1] * (x.ndim - 1))
        factors[path] = factor
    return unflatten_dict(factors)


def _top_layer(task: Task, params: dict) -> int:
    """Returns the number of the layer next to the output; 0 if no param has a layer number."""
    numbers = map(task.layer_ids, flatten_dict(params))
    return max((int(np.max(layers)) for layers in numbers if layers is not None), default=0)
