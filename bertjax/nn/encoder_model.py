"""The base class of the encoders of all families: from token ids to hidden states and a pooled output."""

from collections.abc import Iterable
from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import BertConfig, Compute, ModelConfig
from bertjax.nn.encoder import Embeddings
from bertjax.nn.heads import Pooler
from bertjax.nn.ops.dropout import fold_in


class EncoderModel(nn.Module):
    """Embeddings, layers, and a pooler. Params are float32.

    A family overrides `make_layers`, and each other method whose default does not fit.
    """

    config: ModelConfig
    compute: Compute = Compute()

    def setup(self) -> None:
        """Builds the submodules."""
        self.embeddings = self.make_embeddings()
        self.encoder = self.make_layers()
        self.pooler = self.make_pooler()

    def make_embeddings(self) -> Any:
        """Returns the embeddings, a module that `embed` calls. The default has the embeddings of BERT."""
        return Embeddings(cast(BertConfig, self.config), self.compute)

    def make_layers(self) -> Any:
        """Returns the layers, a module that `apply_layers` calls.

        The module maps embeddings `[batch, length, hidden]`, `segments`, `dropout_keys` and `every_layer` to the hidden
        states of the last layer in the same shape, or with `every_layer` to all hidden states `[layers, batch, length,
        hidden]`.
        """
        raise NotImplementedError

    def make_pooler(self) -> Any:
        """Returns the pooler, a module that `pool` calls. The default has BERT's tanh."""
        return Pooler(self.config, self.compute)

    def __call__(
        self,
        input_ids: Array,
        segments: Array,
        token_types: Array,
        positions: Array | None = None,
        dropout_keys: Array | None = None,
        first_tokens: Array | None = None,
    ) -> tuple[Array, Array]:
        """Returns the hidden states `[batch, length, hidden]` and the pooled output `[batch, hidden]`.

        Args:
          input_ids: see `encode`.
          segments: see `encode`.
          token_types: see `encode`.
          positions: see `encode`.
          dropout_keys: see `encode`.
          first_tokens: `[batch, examples]`, the first token of each example of a packed row. The pooled output then is
            `[batch, examples, hidden]`.
        """
        hidden = self.encode(input_ids, segments, token_types, positions, dropout_keys=dropout_keys)
        return hidden, self.pool(self.pooler_input(hidden, dropout_keys), segments, first_tokens)

    def pooler_input(self, hidden: Array, dropout_keys: Array | None) -> Array:
        """Returns the hidden states that `pool` reads. The default is `hidden`; some families apply dropout."""
        return hidden

    def encode(
        self,
        input_ids: Array,
        segments: Array,
        token_types: Array,
        positions: Array | None = None,
        dropout_keys: Array | None = None,
        *,
        every_layer: bool = False,
    ) -> Array:
        """Returns the hidden states of the last layer `[batch, length, hidden]`.

        Args:
          input_ids: token ids `[batch, length]`.
          segments: `[batch, length]`; 0 is padding. Tokens attend only within their segment. A packed row contains
            several examples as segments 1, 2, ...; Google's `input_mask` is a row of one segment.
          token_types: `[batch, length]`; 0 in sentence A, 1 in sentence B (Google's `segment_ids`).
          positions: indices of the position embeddings `[batch, length]`; None: 0, 1, ..., length - 1.
          dropout_keys: random keys `[batch]`, one per row; None: no dropout.
          every_layer: return the embeddings and the hidden states of all layers, `[layers + 1, batch, length, hidden]`.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        x = self.embed(input_ids, token_types, positions, dropout_keys)
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        hidden = self.apply_layers(x, positions, segments, dropout_keys, every_layer)
        return jnp.concatenate([x[None], hidden]) if every_layer else hidden

    def embed(self, input_ids: Array, token_types: Array, positions: Array, dropout_keys: Array | None) -> Array:
        """Returns the embeddings `[batch, length, hidden]`; arguments as in `encode`."""
        return self.embeddings(input_ids, token_types, positions, fold_in(dropout_keys, 0))

    def apply_layers(
        self, x: Array, positions: Array, segments: Array, dropout_keys: Array | None, every_layer: bool
    ) -> Array:
        """Returns the hidden states after the layers, see `make_layers`."""
        return self.encoder(x, segments, dropout_keys, every_layer=every_layer)

    def encode_words(
        self,
        input_ids: Array,
        segments: Array,
        token_types: Array,
        places: Array,
        positions: Array | None = None,
        dropout_keys: Array | None = None,
    ) -> tuple[Array, Array]:
        """Returns the hidden states that predict tokens, and their positions `[batch, predictions]`.

        The default returns the hidden states and `places`.

        Args:
          input_ids: see `encode`. There is a [MASK] at each place.
          segments: see `encode`.
          token_types: see `encode`.
          places: `[batch, predictions]`, the positions of the tokens to predict.
          positions: see `encode`.
          dropout_keys: see `encode`.
        """
        return self.encode(input_ids, segments, token_types, positions, dropout_keys), places

    def encode_permuted(
        self,
        input_ids: Array,
        segments: Array,
        token_types: Array,
        places: Array,
        seen: Array,
        positions: Array | None = None,
        dropout_keys: Array | None = None,
        memory: Any = None,
    ) -> tuple[Array, Array, Any]:
        """Returns the hidden states of both streams, if the `lm_type` of the family is permuted.

        Args:
          input_ids: see `encode`.
          segments: see `encode`.
          token_types: see `encode`.
          places: `[batch, predictions]`, the positions of the tokens to predict.
          seen: booleans `[batch, length or 1, length]`: the tokens that each position sees. A hidden state also sees
            its token; a hidden state that predicts a token does not.
          positions: see `encode`.
          dropout_keys: see `encode`.
          memory: the `RecurrentMemory` of earlier tokens, which all positions see; None: no memory.

        Returns:
          The hidden states `[batch, length, hidden]`; the hidden states that predict the tokens at `places`, `[batch,
          predictions, hidden]`; and the next memory, or None.
        """
        raise NotImplementedError

    def word_embeddings(self) -> Array:
        """Returns the table that the head for words shares, `[padded vocab, embedding_size]`."""
        return self.embeddings.word.embedding

    def prediction_states(self, hidden: Array, positions: Array) -> Iterable[tuple[Array, Array]]:
        """Returns pairs of hidden states and the positions `[batch, ...]` that are predicted from these states.

        The default is one pair. An encoder with two directions returns a pair for each direction.
        """
        return [(hidden, positions)]

    def token_states(self, hidden: Array) -> Array:
        """Returns the input of a token classifier, `[batch, length, hidden]`. The default is `hidden`."""
        return hidden

    def pool(self, hidden: Array, segments: Array, first_tokens: Array | None) -> Array:
        """Returns the pooled output. The default pools the first token of each example."""
        return self.pooler(hidden, first_tokens)


class RotaryModel(EncoderModel):
    """The base class of encoders without token types, whose positions rotate queries and keys.

    The embeddings take ids only. The layers take the positions `[batch, length]` as the second argument.
    """

    def embed(self, input_ids: Array, token_types: Array, positions: Array, dropout_keys: Array | None) -> Array:
        """Returns the embeddings of token ids `[batch, length, hidden]`."""
        return self.embeddings(input_ids)

    def apply_layers(
        self, x: Array, positions: Array, segments: Array, dropout_keys: Array | None, every_layer: bool
    ) -> Array:
        """Returns the hidden states after the layers."""
        return self.encoder(x, positions, segments, dropout_keys, every_layer=every_layer)


def layer_inputs(model: EncoderModel, params: dict, ids: Array, segments: Array, token_types: Array) -> Array:
    """Returns the inputs of all layers `[layers, batch, length, hidden]`.

    Args:
      model: an unbound encoder.
      params: the params of the encoder.
      ids: token ids `[batch, length]`.
      segments: `[batch, length]`.
      token_types: `[batch, length]`.
    """
    states = model.apply({"params": params}, ids, segments, token_types, every_layer=True, method="encode")
    return jnp.asarray(states)[:-1]
