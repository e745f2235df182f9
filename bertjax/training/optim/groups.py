"""The learning rate and the weight decay of each param: the config's, unless a group says otherwise.

A group of `config.optimizer.groups` has the params in whose names, such as "bert/encoder/layers/output/kernel", its
pattern is found. A param is in one group at most.
"""

import re

import jax
import optax
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.defaults import param_group


def matrices(params):
    """Marks kernels, their updates and embeddings True, which are decayed; biases and the params of norms False."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_matrix(path), params)


def _is_matrix(path) -> bool:
    return path[-1].key in ("kernel", "embedding", "lora_a", "lora_b")


def add_weight_decay(config, scale: float = 1.0) -> optax.GradientTransformation:
    """Adds `scale` times `weight_decay` times each matrix to its update."""

    def decayed(path, update, param):
        decay = scale * decay_of(config, path)
        return update + decay * param if decay else update

    def update(updates, state, params):
        return jax.tree_util.tree_map_with_path(decayed, updates, params), state

    # It has no state. Checkpoints know this place as that of optax's decay of some params.
    return optax.GradientTransformation(lambda params: optax.MaskedState(optax.EmptyState()), update)


def scale_by_learning_rate(config) -> optax.GradientTransformationExtraArgs:
    """The last transformation: multiplies all updates by the negative learning rate of the step."""

    def update(updates, state, params=None, *, learning_rate, **_):
        del params

        def scaled(path, update):
            factor = factor_of(config, path)
            return -(learning_rate if factor == 1 else factor * learning_rate) * update

        return jax.tree_util.tree_map_with_path(scaled, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def decay_of(config, path) -> float:
    group = _group(config, path)
    if group is not None and group.weight_decay is not None:
        return group.weight_decay
    return config.weight_decay if _is_matrix(path) else 0.0


def factor_of(config, path) -> float:
    group = _group(config, path)
    return 1.0 if group is None else group.learning_rate_factor


def _group(config, path):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return next((group for group in config.groups.values() if re.search(group.params, name)), None)


def validate(config) -> None:
    """Raises `UserError` for a group that is not one."""
    for name, group in config.groups.items():
        field = f"config.optimizer.groups.{name}"
        if not isinstance(group, ConfigDict) or set(group) != set(param_group("")) or not isinstance(group.params, str):
            shown = group.to_dict() if isinstance(group, ConfigDict) else group
            raise UserError(f"{field} = {shown!r}: write param_groups({name}=param_group(PATTERN, ...))")
        try:
            re.compile(group.params)
        except re.error as error:
            raise UserError(f"{field}.params = {group.params!r}: no regular expression ({error})") from None
        if not 0 <= group.learning_rate_factor:
            raise UserError(f"{field}.learning_rate_factor = {group.learning_rate_factor}: must be at least 0")
        if group.weight_decay is not None and not 0 <= group.weight_decay < 1:
            raise UserError(f"{field}.weight_decay = {group.weight_decay}: must be at least 0 and below 1")


def check_params(config, params) -> None:
    """Raises `UserError` for a group without params, and for a param that two groups have."""
    paths = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    owners: dict[str, str] = {}
    for group, content in config.groups.items():
        field, found = f"config.optimizer.groups.{group}.params = {content.params!r}", False
        for name in names:
            if re.search(content.params, name):
                found = True
                if name in owners:
                    raise UserError(f"{field}: {name} is also in groups.{owners[name]}; a param has one group only")
                owners[name] = group
        if not found:
            known = ", ".join(names[:3])
            raise UserError(f"{field}: no param has this in its name; they are called {known}, ...")
