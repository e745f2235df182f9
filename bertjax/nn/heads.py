"""The heads on top of the encoder."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.nn.attention import Dense, LayerNorm, partitioned
from bertjax.nn.encoder import ACTIVATIONS, Embedding
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.matmul import project


class Pooler(nn.Module):
    """Returns activation(W h + b) for the state h of some tokens."""

    config: ModelConfig
    compute: Compute
    activation: Callable = jnp.tanh

    @nn.compact
    def __call__(self, hidden: Array, tokens: Array | None = None) -> Array:
        """`[batch, length, hidden]` -> `[batch, hidden]` for the first token.

        With `tokens` `[batch]` or `[batch, examples]` -> `[batch, hidden]` or `[batch, examples, hidden]`.
        """
        size = self.config.hidden_size
        if tokens is None:
            first = hidden[:, 0]
        else:
            first = jnp.take_along_axis(hidden, tokens.reshape(tokens.shape[0], -1)[:, :, None], axis=1)
            first = first.reshape(*tokens.shape, size)
        dense = Dense(self.config, self.compute, (size,), (size,), ("embed", None), name="dense")
        return self.activation(dense(first))


class MaskedLanguageModelHead(nn.Module):
    """Predicts the words at masked positions.

    The head is a dense layer (to the embedding size), activation, LayerNorm, and a decoder with a bias. The decoder is
    tied to the word embeddings, or a separate table without `config.tie_word_embeddings`. With `config.output` "bias"
    the head is the decoder with the bias, and with "plain" the decoder without the bias.
    """

    config: ModelConfig
    compute: Compute

    @nn.compact
    def __call__(self, hidden: Array, masked_positions: Array, word_embeddings: Array) -> Array:
        """Returns float32 logits `[batch, predictions, padded vocab]`.

        Args:
          hidden: `[batch, length, hidden]`.
          masked_positions: `[batch, predictions]`.
          word_embeddings: `[padded vocab, embedding_size]`.
        """
        config = self.config
        hidden = jnp.take_along_axis(hidden, masked_positions[:, :, None], axis=1)
        bias = 0.0
        if config.output == "transform":
            size = config.embedding_size
            dense = ((config.hidden_size,), (size,), ("embed", None), config.bias, config.output_init_scale)
            hidden = ACTIVATIONS[config.hidden_act](Dense(config, self.compute, *dense, name="dense")(hidden))
            hidden = LayerNorm(config, self.compute, config.bias, size, name="norm")(hidden)
        if config.output != "plain":
            bias_init = partitioned(nn.initializers.zeros, ("vocab",))
            bias = self.param("bias", bias_init, (config.padded_vocab_size,))
        if not config.tie_word_embeddings:
            decoder = Embedding(config, self.compute.dtype, config.padded_vocab_size, "vocab", name="decoder")
            word_embeddings = decoder.embedding
        return decoded(hidden, word_embeddings, bias, config, self.compute)


def decoded(hidden: Array, table: Array, bias: Any, config: ModelConfig, compute: Compute) -> Array:
    """Returns the float32 logits of words `[..., padded vocab]`; the rows that pad the vocabulary are masked.

    Args:
      hidden: hidden states `[..., size]`.
      table: `[padded vocab, size]`.
      bias: `[padded vocab]`, or 0.
      config: the model config.
      compute: the dtypes.
    """
    if compute.casts_factors:
        logits = project(hidden, table, compute, outputs_first=True)
    else:
        table = table.astype(compute.dtype)
        logits = jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
    is_token = jnp.arange(config.padded_vocab_size) < config.vocab_size
    return jnp.where(is_token, logits + bias, jnp.finfo(jnp.float32).min)


def word_flops(config: ModelConfig, predictions: int) -> int:
    """Returns the matrix-multiply FLOPs of the logits of words in a forward pass (2 per multiply-add)."""
    transform = config.hidden_size if config.output == "transform" else 0
    return 2 * predictions * config.embedding_size * (transform + config.padded_vocab_size)


def pooled_flops(config: ModelConfig, outputs: int, classes: int = 2) -> int:
    """Returns the matrix-multiply FLOPs of pooled outputs and their logits in a forward pass."""
    return 2 * outputs * (config.hidden_size**2 + classes * config.hidden_size)


class NextSentenceHead(nn.Module):
    """Classifies pairs; class 1 is a random next sentence, or swapped segments (ALBERT)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, pooled: Array) -> Array:
        """`[batch, hidden]` -> float32 `[batch, 2]`."""
        return Dense(self.config, Compute(), pooled.shape[-1:], (2,), ("embed", None), name="dense")(pooled)


class ReplacedTokensHead(nn.Module):
    """Detects replaced tokens.

    Two dense layers, as in ELECTRA (Clark et al. 2020; ElectraDiscriminatorPredictions of transformers).
    """

    config: ModelConfig
    compute: Compute

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """`[batch, length, hidden]` -> float32 `[batch, length]`, above 0 for tokens that are probably replaced."""
        config, size = self.config, hidden.shape[-1:]
        hidden = Dense(config, self.compute, size, size, ("embed", None), name="dense")(hidden)
        hidden = ACTIVATIONS[config.hidden_act](hidden)
        return Dense(config, Compute(), size, (1,), ("embed", None), name="output")(hidden)[..., 0]


class Classifier(nn.Module):
    """The fine-tuning head: dropout and a dense layer (Devlin et al. 2019, section 4)."""

    config: ModelConfig
    labels: int
    rate: float

    @nn.compact
    def __call__(self, hidden: Array, dropout_keys: Array | None = None) -> Array:
        """`[..., hidden]` -> float32 `[..., labels]`."""
        keys = fold_in(dropout_keys, self.config.num_hidden_layers + 1)  # the encoder uses lower numbers
        hidden = dropout(hidden, self.rate, keys)
        return Dense(self.config, Compute(), hidden.shape[-1:], (self.labels,), ("embed", None), name="dense")(hidden)
