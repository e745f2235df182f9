"""The modules of ELMo."""

from collections.abc import Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import BertConfig, Compute
from bertjax.nn.encoder_model import EncoderModel
from bertjax.nn.lstm import lstm_cell
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.segments import join_ends


class ElmoModel(EncoderModel):
    """The encoder of ELMo. A hidden state is the forward state, concatenated with the backward state."""

    config: BertConfig

    def make_layers(self) -> nn.Module:
        """Returns the layers."""
        return BiLMEncoder(self.config, self.compute)

    def pool(self, hidden: jax.Array, segments: jax.Array, first_tokens: jax.Array | None) -> jax.Array:
        """Returns the pooled output of the last state of each direction."""
        return self.pooler(join_ends(hidden, segments)[:, None])

    def prediction_states(self, hidden: jax.Array, positions: jax.Array) -> Iterable[tuple[jax.Array, jax.Array]]:
        """Returns hidden states: forward with the first half of `positions`, and backward with the second half.

        The hidden states of the other direction are replaced by zeros, so that one head serves both directions.
        """
        is_forward = jnp.arange(hidden.shape[-1]) < hidden.shape[-1] // 2
        directions = [jnp.where(half, hidden, jnp.zeros_like(hidden)) for half in (is_forward, ~is_forward)]
        return zip(directions, jnp.split(positions, 2, axis=1), strict=True)


class BiLMEncoder(nn.Module):
    """A forward and a backward stack of LSTMs with `hidden_size / 2` units (Peters et al. 2018, section 3.1).

    Neither stack reads the states of the other, so that no state sees the token that it predicts. Layers after the
    first layer have residual connections. Padding (segment 0) at the end of a row is ignored. Unlike in the
    paper, the LSTMs have no projection.
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
            keys = fold_in(dropout_keys, layer + 1)  # number 0 is the dropout of the embeddings
            inputs = [
                dropout(layer_input, self.config.hidden_dropout_prob, fold_in(keys, site))
                for site, layer_input in enumerate((forward, backward))
            ]
            forward_rnn = nn.RNN(cell(name=f"forward_{layer}"))
            backward_rnn = nn.RNN(cell(name=f"backward_{layer}"), reverse=True, keep_order=True)
            forward_output = jnp.asarray(forward_rnn(inputs[0], seq_lengths=lengths))
            backward_output = jnp.asarray(backward_rnn(inputs[1], seq_lengths=lengths))
            is_first = layer == 0  # the first layer has no residual connection
            forward = forward_output if is_first else forward + forward_output
            backward = backward_output if is_first else backward + backward_output
            states.append(jnp.concatenate([forward, backward], axis=-1))
        return jnp.stack(states) if every_layer else states[-1]
