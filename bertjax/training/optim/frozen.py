"""What of the params is not trained: what the task leaves as it is, groups whose rate is 0, and the first layers; and
the rates of the layers that are.

Frozen params have no gradient, which the norm of the gradients would count, no moments and no weight decay.
"""

from collections.abc import Mapping

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.common.errors import UserError
from bertjax.training.optim import groups
from bertjax.training.task import Task

# Params that are not trained, by path: of an array that stacks layers, how many of these, its first ones; None: the
# whole array.
Frozen = Mapping[tuple[str, ...], int | None]


def find(task: Task, config, params: dict) -> Frozen:
    """Returns what is frozen of a task's params, or of a tree of the same form.

    Raises `UserError` if a group has no params, if the model has fewer layers, or if nothing is left to train.
    """
    groups.check_params(config.optimizer, params)
    paths, first = flatten_dict(params), config.freeze_layers
    if first > (top := _top_layer(task, params)):
        raise UserError(f"config.freeze_layers = {first}: the model has {top} layers")
    found: dict[tuple[str, ...], int | None] = {}
    for path in paths:
        numbers = task.layer_numbers(path)
        is_below = np.atleast_1d(False if numbers is None or not first else numbers <= first)
        factor = groups.factor_of(config.optimizer, tuple(map(jax.tree_util.DictKey, path)))
        if is_below.all() or task.is_frozen(path) or factor == 0:
            found[path] = None
        elif is_below.any():
            found[path] = int(is_below.sum())
    if all(found.get(path, 0) is None for path in paths):
        raise UserError("config.optimizer.groups: their learning rates of 0 leave nothing to train")
    return found


def layer_factors(task: Task, decay: float, params: dict, trained: dict, frozen: Frozen) -> dict:
    """Returns what `optimizer.layer_decay` multiplies the updates of `trained`, the trained params, by: a tree of them.

    The factor of layer i of L is `decay ** (L - i)`, where embeddings are layer 0. What comes after the layers has 1
    (Sun et al. 2019, section 5.3.4).

    Raises `UserError` if no param is known to be of a layer.
    """
    if not (top := _top_layer(task, params)):
        raise UserError(f"config.optimizer.layer_decay = {decay}: the model's family names no layers of its params")
    factors = {}
    for path, x in flatten_dict(trained).items():
        numbers = task.layer_numbers(path)
        factor = np.asarray(1 if numbers is None else decay ** (top - numbers), np.float32)
        if factor.ndim:
            factor = factor[frozen.get(path, 0) :].reshape(-1, *[1] * (x.ndim - 1))
        factors[path] = factor
    return unflatten_dict(factors)


def _top_layer(task: Task, params: dict) -> int:
    """Returns the number of the layer that is nearest to the output; 0 if no param is known to be of a layer."""
    numbers = map(task.layer_numbers, flatten_dict(params))
    return max((int(np.max(each)) for each in numbers if each is not None), default=0)
