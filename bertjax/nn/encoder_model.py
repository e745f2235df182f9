"""What the encoders of all families have in common: from token ids to hidden states and a pooled output."""

import flax.linen as nn
import jax.numpy as jnp

from bertjax.config.model_config import BertConfig, Compute
from bertjax.nn.encoder import Embeddings
from bertjax.nn.heads import Pooler
from bertjax.nn.ops.dropout import fold_in


class EncoderModel(nn.Module):
    """Embeddings, the layers of a family, and a pooler. Params are float32.

    A family overrides `make_layers`, `through_layers` if these also take positions, and `pool` and `readers` if its
    hidden states have not all seen the whole text.
    """

    config: BertConfig
    compute: Compute = Compute()

    def setup(self):
        self.embeddings = Embeddings(self.config, self.compute)
        self.encoder = self.make_layers()
        self.pooler = self.make_pooler()

    def make_layers(self) -> nn.Module:
        """Returns the layers, a module: (x `[batch, length, hidden]`, segments, dropout_keys, every_layer=) -> hidden
        states of the last layer in this shape, or with `every_layer` of each `[layers, batch, length, hidden]`."""
        raise NotImplementedError

    def through_layers(self, x, positions, segments, dropout_keys, every_layer: bool):
        """Returns what the layers make of embedded tokens, see `make_layers`."""
        del positions
        return self.encoder(x, segments, dropout_keys, every_layer=every_layer)

    def make_pooler(self) -> nn.Module:
        """Returns the pooler, with BERT's tanh unless a family says otherwise."""
        return Pooler(self.config, self.compute)

    def __call__(self, input_ids, segments, token_types, positions=None, dropout_keys=None, first_tokens=None):
        """As `encode`; also returns the pooled output `[batch, hidden]`.

        If `first_tokens` `[batch, examples]` is given, the latter is `[batch, examples, hidden]`.
        """
        hidden = self.encode(input_ids, segments, token_types, positions, dropout_keys=dropout_keys)
        return hidden, self.pool(hidden, segments, first_tokens)

    def encode(self, input_ids, segments, token_types, positions=None, dropout_keys=None, *, every_layer: bool = False):
        """Returns the last hidden states `[batch, length, hidden]` only. Inputs are `[batch, length]` integers.

        Args:
          input_ids: token ids.
          segments: tokens attend only within their segment. 0 is padding, so Google's `input_mask` is one segment.
            Several examples can share a row as segments 1, 2, ...
          token_types: 0 in sentence A, 1 in sentence B (Google's `segment_ids`).
          positions: indices into the position embeddings; None: 0, 1, ..., length - 1.
          dropout_keys: `[batch]` random keys, one per row; None: no dropout.
          every_layer: return `[layers + 1, batch, length, hidden]`, the embeddings first.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        x = self.embeddings(input_ids, token_types, positions, fold_in(dropout_keys, 0))
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        hidden = self.through_layers(x, positions, segments, dropout_keys, every_layer)
        return jnp.concatenate([x[None], hidden]) if every_layer else hidden

    def encode_words(self, input_ids, segments, token_types, places, positions=None, dropout_keys=None):
        """Returns states from which the words at some places can be predicted, and where these are among the states.

        `places`: `[batch, predictions]`. As a rule they are the hidden states, which have seen the [MASK]s there.
        """
        return self.encode(input_ids, segments, token_types, positions, dropout_keys), places

    def encode_permuted(
        self, input_ids, segments, token_types, places, seen, positions=None, dropout_keys=None, memory=None
    ):
        """Returns, if the family's `words` are permuted, the hidden states; states `[batch, predictions, hidden]` that
        predict the words at some places; and what a memory then is, or None.

        Args:
          places: `[batch, predictions]`.
          seen: `[batch, length or 1, length]` booleans: which tokens each place sees. Hidden states see their own
            tokens as well, those that predict do not.
          memory: a `nn.ops.recurrent_memory.Memory` of tokens before these, which all see; None: there are none.
        """
        raise NotImplementedError

    def word_embeddings(self):
        """Returns the table that the output layer for words shares, `[padded vocab, embedding_size]`."""
        return self.embeddings.word.embedding

    def readers(self, hidden, positions):
        """Returns pairs of states and of positions `[batch, ...]` at which words are predicted from these states."""
        return [(hidden, positions)]

    def of_tokens(self, hidden):
        """Returns what is classified of each token `[batch, length, hidden]`, the hidden states unless a family says
        otherwise."""
        return hidden

    def pool(self, hidden, segments, first_tokens):
        """Returns the pooled output, of the first token unless a family says otherwise."""
        del segments
        return self.pooler(hidden, first_tokens)


class RotaryModel(EncoderModel):
    """An encoder without token types, whose positions only turn queries and keys.

    Its `embeddings` take ids alone, and its layers the positions `[batch, length]` after x: (x, positions, segments,
    dropout_keys, every_layer=).
    """

    def encode(self, input_ids, segments, token_types, positions=None, dropout_keys=None, *, every_layer: bool = False):
        """As `EncoderModel.encode`."""
        del token_types
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        x = nn.with_logical_constraint(self.embeddings(input_ids), ("batch", "length", "embed"))
        hidden = self.encoder(x, positions, segments, dropout_keys, every_layer=every_layer)
        return jnp.concatenate([x[None], hidden]) if every_layer else hidden
