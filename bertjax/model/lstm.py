"""LSTMs: a pair of one-directional stacks instead of Transformer layers (ELMo), and a BiLSTM to put on top of BERT."""

import functools

import flax.linen as nn
import jax.numpy as jnp

from bertjax.config import BertConfig, Compute
from bertjax.model.dropout import dropout, fold_in


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


class TwoWayLSTMs(nn.Module):
    """A forward and a backward stack of LSTMs, of `hidden_size / 2` units each (Peters et al. 2018, section 3.1).

    Neither sees the states of the other, so that both can learn to predict words. From the second layer on, a layer
    adds to what it reads. Ignores padding, which is segment 0 at the end of a row. ELMo's have more units, and project
    them.
    """

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(self, x, segments, dropout_keys=None, *, every_layer: bool = False):
        """`[batch, length, hidden]` -> states of the last layer, forward ones first, in the same shape.

        With `every_layer` those of all layers `[layers, batch, length, hidden]`.
        """
        lengths, states = (segments > 0).sum(-1), []
        cell = lstm_cell(self.config.hidden_size // 2, self.compute.dtype)
        forward = backward = x
        for layer in range(self.config.num_hidden_layers):
            keys = fold_in(dropout_keys, layer + 1)  # 0 is the embeddings' dropout
            inputs = [
                dropout(read, self.config.hidden_dropout_prob, fold_in(keys, site))
                for site, read in enumerate((forward, backward))
            ]
            ahead = nn.RNN(cell(name=f"forward_{layer}"))(inputs[0], seq_lengths=lengths)
            back = nn.RNN(cell(name=f"backward_{layer}"), reverse=True, keep_order=True)(inputs[1], seq_lengths=lengths)
            forward, backward = (ahead, back) if layer == 0 else (forward + ahead, backward + back)
            states.append(jnp.concatenate([forward, backward], axis=-1))
        return jnp.stack(states) if every_layer else states[-1]


class BiLSTM(nn.Module):
    """A stack of bidirectional LSTM layers: `[batch, length, width]` -> `[batch, length, 2 * size]`.

    Applies dropout before each layer. Ignores padding, which is segment 0 at the end of a row.
    """

    config: BertConfig
    dtype: jnp.dtype
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
