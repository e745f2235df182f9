"""The modules of BERT."""

import jax.numpy as jnp

from bertjax.config.model_config import BertConfig
from bertjax.nn.encoder import Encoder
from bertjax.nn.encoder_model import EncoderModel
from bertjax.nn.ops.plain_attention import Cache
from bertjax.nn.ops.segments import last_tokens


class BertModel(EncoderModel):
    """Layers of self-attention. A causal model is pooled at the last token of a text, which alone sees all of it."""

    def make_layers(self):
        return Encoder(self.config, self.compute)

    def through_layers(self, x, positions, segments, dropout_keys, every_layer: bool):
        return self.encoder(x, segments, dropout_keys, positions, every_layer=every_layer)

    def pool(self, hidden, segments, first_tokens):
        return self.pooler(hidden, last_tokens(segments, first_tokens) if self.config.causal else first_tokens)

    def decode(self, input_ids, positions, cache: Cache):
        """Runs a causal model on some tokens that follow those in a cache: hidden states, and the cache with these.

        Args:
          input_ids: `[batch, length]`.
          positions: `[length]`, one after the other.
          cache: a cache of the form that `new_cache` makes.
        """
        each = jnp.broadcast_to(positions, input_ids.shape)
        x = self.embeddings(input_ids, jnp.zeros_like(input_ids), each)
        return self.encoder(x, positions, positions=each, cache=cache)


def new_cache(config: BertConfig, batch: int, longest: int, dtype) -> Cache:
    """Returns an empty cache for `longest` tokens, `[layers, batch, longest, heads, size]`."""
    shape = (config.num_hidden_layers, batch, longest, config.num_attention_heads, config.head_size)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
