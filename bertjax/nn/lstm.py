"""LSTMs: a pair of one-directional stacks instead of Transformer layers (ELMo), and a BiLSTM on top of an encoder."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import ModelConfig
from bertjax.nn.ops.dropout import dropout, fold_in


def lstm_cell(size: int, dtype: str) -> Callable[..., Any]:
    """Returns a function (name=...) -> LSTM cell. No mesh axis partitions the params of the cell."""
    return functools.partial(
        nn.OptimizedLSTMCell,
        size,
        dtype=dtype,
        kernel_init=_unsplit(nn.initializers.lecun_normal()),
        recurrent_kernel_init=_unsplit(nn.initializers.orthogonal()),
        bias_init=_unsplit(nn.initializers.zeros),
    )


def _unsplit(init: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an initializer so that no mesh axis partitions its arrays."""

    def boxed(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        return nn.with_logical_partitioning(init, (None,) * len(shape))(key, shape, dtype)

    return boxed


class BiLSTM(nn.Module):
    """A stack of bidirectional LSTM layers with dropout before each layer."""

    config: ModelConfig
    dtype: str
    size: int
    layers: int

    @nn.compact
    def __call__(self, x: Array, segments: Array, dropout_keys: Array | None = None) -> Array:
        """`[batch, length, width]` -> `[batch, length, 2 * size]`. Ignores padding: segment 0 at the end of a row."""
        lengths, cell = (segments > 0).sum(-1), lstm_cell(self.size, self.dtype)
        for layer in range(self.layers):
            keys = fold_in(dropout_keys, self.config.num_hidden_layers + 2 + layer)  # `Classifier` uses lower numbers
            x = dropout(x, self.config.hidden_dropout_prob, keys)
            forward, backward = (nn.RNN(cell(name=f"{way}_{layer}")) for way in ("forward", "backward"))
            x = jnp.asarray(nn.Bidirectional(forward, backward)(x, seq_lengths=lengths))
        return x
