"""LSTMs: a pair of one-directional stacks instead of Transformer layers (ELMo), and a BiLSTM to put on top of BERT."""

import functools

import flax.linen as nn
import jax.numpy as jnp

from bertjax.config.model_config import ModelConfig
from bertjax.nn.ops.dropout import dropout, fold_in


def lstm_cell(size: int, dtype):
    """Returns a maker of LSTM cells, (name=...) -> cell, whose arrays no mesh axis splits."""
    return functools.partial(
        nn.OptimizedLSTMCell,
        size,
        dtype=dtype,
        kernel_init=_unsplit(nn.initializers.lecun_normal()),
        recurrent_kernel_init=_unsplit(nn.initializers.orthogonal()),
        bias_init=_unsplit(nn.initializers.zeros),
    )


def _unsplit(init):
    """Wraps an initializer so that no mesh axis partitions its arrays in compute."""

    def boxed(key, shape, dtype=jnp.float32):
        return nn.with_logical_partitioning(init, (None,) * len(shape))(key, shape, dtype)

    return boxed


class BiLSTM(nn.Module):
    """A stack of bidirectional LSTM layers: `[batch, length, width]` -> `[batch, length, 2 * size]`.

    Applies dropout before each layer. Ignores padding, which is segment 0 at the end of a row.
    """

    config: ModelConfig
    dtype: str
    size: int
    layers: int

    @nn.compact
    def __call__(self, x, segments, dropout_keys=None):
        lengths, cell = (segments > 0).sum(-1), lstm_cell(self.size, self.dtype)
        for layer in range(self.layers):
            keys = fold_in(dropout_keys, self.config.num_hidden_layers + 2 + layer)  # Classifier uses the one before
            x = dropout(x, self.config.hidden_dropout_prob, keys)
            both = nn.Bidirectional(nn.RNN(cell(name=f"forward_{layer}")), nn.RNN(cell(name=f"backward_{layer}")))
            x = both(x, seq_lengths=lengths)
        return x
