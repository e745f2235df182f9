"""The modules of the two stacks of LSTMs."""

import flax.linen as nn
import jax.numpy as jnp

from bertjax.config.model_config import BertConfig, Compute
from bertjax.nn.encoder_model import EncoderModel
from bertjax.nn.lstm import lstm_cell
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.segments import join_ends


class LstmsModel(EncoderModel):
    """Two stacks of LSTMs: the first half of a hidden state is the forward one's."""

    def make_layers(self):
        return TwoWayLSTMs(self.config, self.compute)

    def pool(self, hidden, segments, first_tokens):
        """Takes each direction's state where it has read the whole row."""
        del first_tokens
        return self.pooler(join_ends(hidden, segments)[:, None])

    def readers(self, hidden, positions):
        """The forward stack has the first half of the positions, the backward one the other half."""
        is_forward = jnp.arange(hidden.shape[-1]) < hidden.shape[-1] // 2
        each = [jnp.where(seen, hidden, jnp.zeros_like(hidden)) for seen in (is_forward, ~is_forward)]
        return zip(each, jnp.split(positions, 2, axis=1), strict=True)


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
