"""The learning rate and the weight decay of each param: from the param's group, or else from `config.optimizer`.

A group of `config.optimizer.groups` contains the params whose names match its regular expression (`re.search`). A name
is the path of the param, such as "bert/encoder/layers/output/kernel". A param belongs to at most one group.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.defaults import param_group


def matrix_mask(params: Any) -> Any:
    """Returns a tree of booleans: True for kernels, embeddings and LoRA matrices; False for biases and norm params.

    Only matrices have weight decay by default.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_matrix(path), params)


def _is_matrix(path: tuple) -> bool:
    return path[-1].key in ("kernel", "embedding", "lora_a", "lora_b")


def stateless_with_learning_rate(
    update: Callable[[optax.Updates, optax.Params | None, jax.Array], optax.Updates],
) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation without state. `update` also receives the learning rate, unlike in `optax.stateless`.

    Args:
      update: (updates, params, learning rate of the step) -> new updates.
    """

    def update_with_state(
        updates: optax.Updates, state: Any, params: Any = None, *, learning_rate: jax.Array, **_: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        return update(updates, params, learning_rate), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update_with_state)


def add_weight_decay(config: ConfigDict, scale: float = 1.0) -> optax.GradientTransformationExtraArgs:
    """Adds `scale * weight_decay * param` to the update of each param.

    Args:
      config: `config.optimizer`.
      scale: a factor for the weight decay of all params.
    """

    def decayed(path: tuple, update: jax.Array, param: jax.Array) -> jax.Array:
        decay = scale * weight_decay_of(config, path)
        return update + decay * param if decay else update

    decay = optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(decayed, updates, params))
    return optax.masked(decay, True)  # keeps the tree structure of the state in older checkpoints


def scale_by_learning_rate(config: ConfigDict) -> optax.GradientTransformationExtraArgs:
    """Multiplies each update by the negative learning rate and the factor of the param's group.

    Must be the last transformation of a chain.

    Args:
      config: `config.optimizer`.
    """

    def scale_all(updates: optax.Updates, params: optax.Params | None, learning_rate: jax.Array) -> optax.Updates:
        def scaled(path: tuple, update: jax.Array) -> jax.Array:
            factor = learning_rate_factor_of(config, path)
            return -(learning_rate if factor == 1 else factor * learning_rate) * update

        return jax.tree_util.tree_map_with_path(scaled, updates)

    return stateless_with_learning_rate(scale_all)


def weight_decay_of(config: ConfigDict, path: tuple) -> float:
    """Returns the weight decay of a param: `weight_decay` of the param's group, if set.

    Otherwise, the weight decay of a matrix is `config.weight_decay`, and the weight decay of another param is 0.

    Args:
      config: `config.optimizer`.
      path: the key path of the param, as `jax.tree_util` returns it.
    """
    group = _group(config, path)
    if group is not None and group.weight_decay is not None:
        return group.weight_decay
    return config.weight_decay if _is_matrix(path) else 0.0


def learning_rate_factor_of(config: ConfigDict, path: tuple) -> float:
    """Returns the learning rate factor of a param's group; 1 for a param without a group.

    Args:
      config: `config.optimizer`.
      path: the key path of the param, as `jax.tree_util` returns it.
    """
    group = _group(config, path)
    return 1.0 if group is None else group.learning_rate_factor


def _group(config: ConfigDict, path: tuple) -> ConfigDict | None:
    """Returns the group of a param; None if no group matches."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return next((group for group in config.groups.values() if re.search(group.params, name)), None)


def validate(config: ConfigDict) -> None:
    """Raises `UserError` if a group of `config.optimizer` is invalid."""
    for name, group in config.groups.items():
        field = f"config.optimizer.groups.{name}"
        if not isinstance(group, ConfigDict) or set(group) != set(param_group("")) or not isinstance(group.params, str):
            value = group.to_dict() if isinstance(group, ConfigDict) else group
            raise UserError(f"{field} = {value!r}: write param_groups({name}=param_group(PATTERN, ...))")
        try:
            re.compile(group.params)
        except re.error as error:
            raise UserError(f"{field}.params = {group.params!r}: must be a regular expression ({error})") from None
        if not 0 <= group.learning_rate_factor:
            raise UserError(f"{field}.learning_rate_factor = {group.learning_rate_factor}: must be at least 0")
        if group.weight_decay is not None and not 0 <= group.weight_decay < 1:
            raise UserError(f"{field}.weight_decay = {group.weight_decay}: must be at least 0 and below 1")


def check_params(config: ConfigDict, params: Any) -> None:
    """Raises `UserError` for a group that matches no param, and for a param that two groups match.

    Args:
      config: `config.optimizer`.
      params: the params, or a tree of the same structure.
    """
    paths = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    group_of: dict[str, str] = {}  # by the name of a param
    for group, content in config.groups.items():
        field = f"config.optimizer.groups.{group}.params = {content.params!r}"
        matching = [name for name in names if re.search(content.params, name)]
        for name in matching:
            if name in group_of:
                raise UserError(
                    f"{field}: {name} also matches groups.{group_of[name]}; a param must match at most one group"
                )
            group_of[name] = group
        if not matching:
            known = ", ".join(names[:3])
            raise UserError(f"{field}: matches no param; names of params are {known}, ...")
