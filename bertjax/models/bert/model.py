"""The modules of BERT."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config.model_config import BertConfig
from bertjax.nn.attention import standardize
from bertjax.nn.encoder import Encoder
from bertjax.nn.encoder_model import EncoderModel
from bertjax.nn.ops.plain_attention import Cache, visible
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
          cache: a cache from `Decodes.new_cache`.
        """
        each = jnp.broadcast_to(positions, input_ids.shape)
        x = self.embeddings(input_ids, jnp.zeros_like(input_ids), each)
        return self.encoder(x, positions, positions=each, cache=cache)


def attention_probabilities(
    config: BertConfig, params: dict, ids: jax.Array, segments: jax.Array, token_types: jax.Array
) -> jax.Array:
    """Returns attention probabilities `[layers, heads, queries, keys]`, see `ExposesAttention`."""
    states = BertModel(config).apply({"params": params}, ids, segments, token_types, every_layer=True, method="encode")
    layers = params["encoder"]["layers"]
    x = jnp.asarray(states)[:-1, 0]  # the input of each layer
    if config.positions == "each_layer":
        x = x + layers["position"]["embedding"][:, config.position_offset :][:, : ids.shape[1]]
    if config.norm == "pre":
        norm = layers["attention_norm"]
        x = standardize(x, config.layer_norm_eps) * norm["scale"][:, None] + norm["bias"][:, None]
    project = layers["attention"]["query_key_value"]
    product = functools.partial(jnp.einsum, precision="highest")
    projected = product("lnh,lhpad->lpand", x, project["kernel"]) + project["bias"][:, :, :, None]
    scores = product("laqd,lakd->laqk", projected[:, 0], projected[:, 1]) / np.sqrt(config.head_size)
    return jax.nn.softmax(jnp.where(visible(segments, config.causal)[0], scores, -jnp.inf), axis=-1)
