"""Selects and combines hidden states as features (Devlin et al. 2019, section 5.3 and table 7)."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from bertjax.common.errors import UserError
from bertjax.config.model_config import ModelConfig


class HiddenStates(NamedTuple):
    """Selects from the `[layers + 1, ...]` hidden states, embeddings first, and says how to combine them."""

    layers: slice
    combine: str  # concat | sum | weighted_sum (with learnt weights, as in ELMo: Peters et al. 2018, equation 1)


HIDDEN_STATES = {
    "embeddings": HiddenStates(slice(0, 1), "sum"),
    "second_to_last": HiddenStates(slice(-2, -1), "sum"),
    "last": HiddenStates(slice(-1, None), "sum"),
    "sum_last_four": HiddenStates(slice(-4, None), "sum"),
    "weighted_sum_last_four": HiddenStates(slice(-4, None), "weighted_sum"),
    "concat_last_four": HiddenStates(slice(-4, None), "concat"),
    "sum_all": HiddenStates(slice(1, None), "sum"),
    "weighted_sum_all": HiddenStates(slice(1, None), "weighted_sum"),
    "weighted_sum_with_embeddings": HiddenStates(slice(0, None), "weighted_sum"),
}
TABLE_7 = (
    "embeddings", "second_to_last", "last", "weighted_sum_last_four", "concat_last_four", "weighted_sum_all",
)  # fmt: skip
WITHOUT_WEIGHTS = tuple(name for name, choice in HIDDEN_STATES.items() if choice.combine != "weighted_sum")


def count_layers(name: str, config: ModelConfig) -> int:
    """Returns the number of hidden states that the choice `name` selects."""
    return len(range(config.num_hidden_layers + 1)[HIDDEN_STATES[name].layers])


def check_layers(name: str, config: ModelConfig, field: str) -> None:
    """Raises `UserError` if the model has too few layers; `field` is the config field or flag to name."""
    if name.endswith("last_four") and config.num_hidden_layers < 4:
        raise UserError(
            f"{field} = {name!r}: the model has {config.num_hidden_layers} layers only; choose {field}=last"
        )


def combine(states: Array, name: str, weights: Array | None = None) -> Array:
    """Combines `[layers + 1, batch, length, hidden]` into `[batch, length, width]`; `weights` is `[count_layers]`."""
    choice = HIDDEN_STATES[name]
    states = states[choice.layers]
    if choice.combine == "concat":
        return jnp.concatenate(list(states), axis=-1)
    if choice.combine == "sum":
        return states.sum(0)
    assert weights is not None
    return jnp.tensordot(weights.astype(states.dtype), states, 1)
