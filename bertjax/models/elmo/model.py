"""The modules of the two stacks of LSTMs."""

from collections.abc import Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import BertConfig, Compute
from bertjax.nn.encoder_model import EncoderModel
from bertjax.nn.lstm import lstm_cell
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.segments import join_ends


class LstmsModel(EncoderModel):
    """Two stacks of LSTMs. The forward stack has the first half of a hidden state."""

    config: BertConfig

    def make_layers(self) -> nn.Module:
        """Returns the layers."""
        return TwoWayLSTMs(self.config, self.compute)

    def pool(self, hidden: jax.Array, segments: jax.Array, first_tokens: jax.Array | None) -> jax.Array:
        """Returns the pooled output of the last state of each direction."""
        return self.pooler(join_ends(hidden, segments)[:, None])

    def prediction_states(self, hidden: jax.Array, positions: jax.Array) -> Iterable[tuple[jax.Array, jax.Array]]:
        """Returns the forward states with the first half of the positions, and the backward states with the rest."""
        is_forward = jnp.arange(hidden.shape[-1]) < hidden.shape[-1] // 2
        directions = [jnp.where(half, hidden, jnp.zeros_like(hidden)) for half in (is_forward, ~is_forward)]
        return zip(directions, jnp.split(positions, 2, axis=1), strict=True)


class TwoWayLSTMs(nn.Module):
    """A forward and a backward stack of LSTMs with `hidden_size / 2` units (Peters et al. 2018, section 3.1).

    Neither stack reads the states of the other, so that both can learn to predict tokens. There are residual sums from
    the second layer on. Padding at the end of a row, segment 0, is ignored. The LSTMs of ELMo have more units and a
    projection.
    """

    config: BertConfig
    compute: Compute

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        segments: jax.Array,
        dropout_keys: jax.Array | None = None,
        *,
        every_layer: bool = False,
    ) -> jax.Array:
        """Returns hidden states, forward states first; arguments and shapes as in `EncoderModel.make_layers`."""
        lengths = (segments > 0).sum(-1)
        states: list[jax.Array] = []
        cell = lstm_cell(self.config.hidden_size // 2, self.compute.dtype)
        forward = backward = x
        for layer in range(self.config.num_hidden_layers):
            keys = fold_in(dropout_keys, layer + 1)  # 0 is the embeddings' dropout
            inputs = [
                dropout(states_before, self.config.hidden_dropout_prob, fold_in(keys, site))
                for site, states_before in enumerate((forward, backward))
            ]
            ahead_rnn = nn.RNN(cell(name=f"forward_{layer}"))
            back_rnn = nn.RNN(cell(name=f"backward_{layer}"), reverse=True, keep_order=True)
            ahead = jnp.asarray(ahead_rnn(inputs[0], seq_lengths=lengths))
            back = jnp.asarray(back_rnn(inputs[1], seq_lengths=lengths))
            forward, backward = (ahead, back) if layer == 0 else (forward + ahead, backward + back)
            states.append(jnp.concatenate([forward, backward], axis=-1))
        return jnp.stack(states) if every_layer else states[-1]
