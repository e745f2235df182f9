"""The embeddings of tokens: the sum of word, position and token-type embeddings."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import BertConfig, Compute, ModelConfig
from bertjax.nn.dense import Dense
from bertjax.nn.embedding_table import Embedding
from bertjax.nn.norm import LayerNorm, Norm, Normalize
from bertjax.nn.ops.dropout import dropout
from bertjax.nn.positions import LearnedPositions, PositionEmbeddings, SinusoidalPositions


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """The choices of the embeddings of a model.

    Attributes:
      positions: the embeddings of absolute positions; None: no such embeddings.
      token_types: the number of token types. A model with one token type uses its embedding for all tokens, and a model
        with 0 token types has no such embeddings.
      norm: the norm of the sum; None: no norm.
      scale: multiplies the word embeddings.
      dropout: the dropout rate after the norm.
      projects: whether a dense layer maps the embeddings to the hidden size.
      projection_bias: whether this dense layer has a bias.
    """

    positions: PositionEmbeddings | None = None
    token_types: int = 0
    norm: Norm | None = None
    scale: float = 1.0
    dropout: float = 0.0
    projects: bool = False
    projection_bias: bool = True


def embeddings_of(config: BertConfig) -> Embeddings:
    """Returns the choices of the embeddings of BERT, from the fields `positions` and `norm` of a model config."""
    learned = LearnedPositions(config.max_position_embeddings, config.position_offset)
    positions = {"learned": learned, "sinusoidal": SinusoidalPositions(config.max_position_embeddings)}
    return Embeddings(
        positions.get(config.positions),
        config.type_vocab_size,
        LayerNorm(config.layer_norm_eps) if config.norm == "post" else None,
        dropout=config.hidden_dropout_prob,
        projects=config.projects_embeddings,
    )


class TokenEmbeddings(nn.Module):
    """Sums word, position and token-type embeddings; then norm, dropout, and projection.

    Attributes:
      config: the model config.
      compute: the dtypes.
      choices: the choices of the model.
    """

    config: ModelConfig
    compute: Compute
    choices: Embeddings

    def setup(self) -> None:
        """Builds the tables."""
        config, compute, choices = self.config, self.compute, self.choices
        size = config.embedding_size
        self.word = Embedding(config, compute.dtype, config.padded_vocab_size, "vocab")
        if choices.positions is not None:
            self.position = choices.positions.module(config, compute, size, "position")
        if choices.token_types:
            self.token_type = Embedding(config, compute.dtype, choices.token_types)
        if choices.norm is not None:
            self.norm = Normalize(choices.norm, size, compute)
        if choices.projects:
            axes = ("embed", None)
            self.projection = Dense(config, compute, (size,), (config.hidden_size,), axes, choices.projection_bias)

    def __call__(
        self, input_ids: Array, token_types: Array, positions: Array, dropout_keys: Array | None = None
    ) -> Array:
        """Three `[batch, length]` integer arrays -> `[batch, length, hidden]`."""
        choices = self.choices
        x = self.word(input_ids)
        x = x if choices.scale == 1 else x * choices.scale
        if choices.positions is not None:
            x += self.position(positions)
        if choices.token_types:  # a lookup outside a table returns NaN
            x += self.token_type(token_types if choices.token_types > 1 else jnp.zeros_like(token_types))
        x = x if choices.norm is None else self.norm(x)
        x = dropout(x, choices.dropout, dropout_keys)
        return self.projection(x) if choices.projects else x
