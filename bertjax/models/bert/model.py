"""The modules of BERT."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config.model_config import BertConfig
from bertjax.nn.attention import standardize
from bertjax.nn.encoder import Encoder
from bertjax.nn.encoder_model import EncoderModel, layer_inputs
from bertjax.nn.ops.plain_attention import KeyValueCache, visible
from bertjax.nn.ops.segments import last_tokens


class BertModel(EncoderModel):
    """The encoder of BERT. A causal model pools the last token of a text, which attends to the whole text."""

    config: BertConfig

    def make_layers(self) -> nn.Module:
        """Returns the layers."""
        return Encoder(self.config, self.compute)

    def apply_layers(
        self, x: jax.Array, positions: jax.Array, segments: jax.Array, dropout_keys: jax.Array | None, every_layer: bool
    ) -> jax.Array:
        """Returns the hidden states after the layers."""
        bias = self.score_bias(x.shape[1])
        return self.encoder(x, segments, dropout_keys, positions, every_layer=every_layer, score_bias=bias)

    def score_bias(self, length: int) -> jax.Array | None:
        """Returns a term of the attention scores of all layers, float32 `[heads, queries, keys]`; None: no term."""
        return None

    def pool(self, hidden: jax.Array, segments: jax.Array, first_tokens: jax.Array | None) -> jax.Array:
        """Returns the pooled output of the first token, or of the last token of a causal model."""
        return self.pooler(hidden, last_tokens(segments, first_tokens) if self.config.causal else first_tokens)

    def decode(
        self, input_ids: jax.Array, positions: jax.Array, cache: KeyValueCache
    ) -> tuple[jax.Array, KeyValueCache]:
        """Runs a causal model on tokens that follow the tokens in a cache.

        Args:
          input_ids: `[batch, length]`.
          positions: consecutive positions `[length]`, equal in all rows.
          cache: keys and values of the earlier tokens, see `Decodes.new_cache`.

        Returns:
          Hidden states `[batch, length, hidden]`, and the cache with the new tokens added.
        """
        row_positions = jnp.broadcast_to(positions, input_ids.shape)
        x = self.embeddings(input_ids, jnp.zeros_like(input_ids), row_positions)
        return self.encoder(x, positions, positions=row_positions, cache=cache)

    @nn.nowrap
    def params_by_layer(self, params: dict) -> dict:
        """Returns the params of all layers `[layers, ...]`, from the params of the encoder."""
        return params["encoder"]["layers"]

    @nn.nowrap
    def attention_probabilities(
        self, params: dict, ids: jax.Array, segments: jax.Array, token_types: jax.Array
    ) -> jax.Array:
        """Returns attention probabilities `[layers, heads, queries, keys]`, see `ExposesAttention`."""
        config, layers = self.config, self.params_by_layer(params)
        x = layer_inputs(self, params, ids, segments, token_types)[:, 0]
        if config.positions == "each_layer":
            x = x + layers["position"]["embedding"][:, config.position_offset :][:, : ids.shape[1]]
        if config.norm == "pre":
            norm = layers["attention_norm"]
            x = standardize(x, config.layer_norm_eps) * norm["scale"][:, None] + norm["bias"][:, None]
        project = layers["attention"]["query_key_value"]
        product = functools.partial(jnp.einsum, precision="highest")
        projected = product("lnh,lhpad->lpand", x, project["kernel"]) + project["bias"][:, :, :, None]
        scores = product("laqd,lakd->laqk", projected[:, 0], projected[:, 1]) / np.sqrt(config.head_size)
        bias = self.apply({"params": params}, ids.shape[1], method="score_bias")
        scores = scores if bias is None else scores + bias
        return jax.nn.softmax(jnp.where(visible(segments, config.causal)[0], scores, -jnp.inf), axis=-1)
