"""The modules of BERT: embeddings, the stack of layers, and the pooler."""

import flax.linen as nn
import jax.numpy as jnp

from bertjax.config import BertConfig, Compute
from bertjax.model.dropout import fold_in
from bertjax.model.encoder import Embeddings, Encoder
from bertjax.model.heads import Pooler
from bertjax.model.plain_attention import Cache
from bertjax.model.segments import last_tokens


class BertModel(nn.Module):
    """Token ids -> hidden states of the last layer `[batch, length, hidden]` and pooled output `[batch, hidden]`.

    Params are float32.
    """

    config: BertConfig
    compute: Compute = Compute()

    def setup(self):
        self.embeddings = Embeddings(self.config, self.compute)
        self.encoder = Encoder(self.config, self.compute)
        self.pooler = Pooler(self.config, self.compute)

    def __call__(self, input_ids, segments, token_types, positions=None, dropout_keys=None, first_tokens=None):
        """As `encode`; `first_tokens` `[batch, examples]`, if given: pooled output `[batch, examples, hidden]`.

        A causal model is pooled at the last token of an example instead, which alone has seen all of it.
        """
        hidden = self.encode(input_ids, segments, token_types, positions, dropout_keys=dropout_keys)
        if self.config.causal:
            return hidden, self.pooler(hidden, last_tokens(segments, first_tokens))
        return hidden, self.pooler(hidden, first_tokens)

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
        hidden = self.encoder(x, segments, dropout_keys, every_layer=every_layer)
        return jnp.concatenate([x[None], hidden]) if every_layer else hidden

    def readers(self, hidden, positions):
        """Returns pairs of states and of positions `[batch, ...]` at which words are predicted from these states."""
        return [(hidden, positions)]

    def decode(self, input_ids, positions, cache: Cache):
        """Runs a causal model on some tokens that follow those in a cache: hidden states, and the cache with these.

        Args:
          input_ids: `[batch, length]`.
          positions: `[length]`, one after the other.
          cache: as `new_cache` makes it.
        """
        each = jnp.broadcast_to(positions, input_ids.shape)
        x = self.embeddings(input_ids, jnp.zeros_like(input_ids), each)
        return self.encoder(x, positions, cache=cache)


def new_cache(config: BertConfig, batch: int, longest: int, dtype) -> Cache:
    """Returns an empty cache for `longest` tokens, `[layers, batch, longest, heads, size]`."""
    shape = (config.num_hidden_layers, batch, longest, config.num_attention_heads, config.head_size)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
