"""The heads on top of the encoder."""

import abc
import dataclasses
import enum
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.nn.activations import ACTIVATIONS
from bertjax.nn.dense import Dense, partitioned
from bertjax.nn.embedding_table import Embedding
from bertjax.nn.norm import LayerNorm, Norm, Normalize
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.matmul import project


class Pooler(nn.Module):
    """Returns tanh(W h + b) for the state h of some tokens."""

    config: ModelConfig
    compute: Compute

    @nn.compact
    def __call__(self, hidden: Array, tokens: Array | None = None) -> Array:
        """`[batch, length, hidden]` -> `[batch, hidden]` for the first token.

        With `tokens` `[batch]` or `[batch, examples]` -> `[batch, hidden]` or `[batch, examples, hidden]`.
        """
        size = (self.config.hidden_size,)
        dense = Dense(self.config, self.compute, size, size, ("embed", None), name="dense")
        return jnp.tanh(dense(states_of_tokens(hidden, tokens)))


def states_of_tokens(hidden: Array, tokens: Array | None) -> Array:
    """Returns the hidden states of some tokens.

    Args:
      hidden: `[batch, length, hidden]`.
      tokens: `[batch]` or `[batch, examples]`; None: the first token of each row.

    Returns:
      `[batch, hidden]` or `[batch, examples, hidden]`.
    """
    if tokens is None:
        return hidden[:, 0]
    states = jnp.take_along_axis(hidden, tokens.reshape(tokens.shape[0], -1)[:, :, None], axis=1)
    return states.reshape(*tokens.shape, hidden.shape[-1])


class Transform(abc.ABC):
    """The layers of a head before its last layer. Equal transforms compare equal."""

    @abc.abstractmethod
    def __call__(self, config: ModelConfig, compute: Compute, hidden: Array, size: int) -> Array:
        """Returns the transformed states `[..., size]`.

        The layers belong to the module whose compact method calls this function.

        Args:
          config: the model config.
          compute: the dtypes.
          hidden: `[..., hidden]`.
          size: the size of the results.
        """

    @abc.abstractmethod
    def flops(self, hidden: int, size: int) -> int:
        """Returns the FLOPs of the matrix products for one state of the size `hidden`."""


@dataclasses.dataclass(frozen=True)
class DenseTransform(Transform):
    """A dense layer, an activation, and a norm.

    Attributes:
      activation: a key of `ACTIVATIONS`.
      norm: the norm; None: no norm.
      bias: whether the dense layer has a bias.
      init_scale: multiplies the standard deviation of the initial values of the dense layer.
    """

    activation: str
    norm: Norm | None = None
    bias: bool = True
    init_scale: float = 1.0

    def __call__(self, config: ModelConfig, compute: Compute, hidden: Array, size: int) -> Array:
        """Returns norm(activation(W h + b)), see `Transform`. The params are `dense` and `norm`."""
        settings = hidden.shape[-1:], (size,), ("embed", None), self.bias, self.init_scale
        hidden = ACTIVATIONS[self.activation](Dense(config, compute, *settings, name="dense")(hidden))
        return hidden if self.norm is None else Normalize(self.norm, size, compute, name="norm")(hidden)

    def flops(self, hidden: int, size: int) -> int:
        """Returns the FLOPs of the dense layer."""
        return 2 * hidden * size


def dense_transform(config: Any) -> DenseTransform:
    """Returns the transform of BERT's head for words, with the activation and the LayerNorm of a model config."""
    norm = LayerNorm(config.layer_norm_eps, config.bias)
    return DenseTransform(config.hidden_act, norm, config.bias, config.output_init_scale)


@dataclasses.dataclass(frozen=True)
class TwoLayerTransform(Transform):
    """Two dense layers without biases, each with an activation (UltraBERT).

    Attributes:
      size: the size of the states between the layers.
      activation: a key of `ACTIVATIONS`.
    """

    size: int
    activation: str

    def __call__(self, config: ModelConfig, compute: Compute, hidden: Array, size: int) -> Array:
        """Returns the transformed states, see `Transform`. The params are `dense` and `second_dense`."""
        for name, width in (("dense", self.size), ("second_dense", size)):
            settings = hidden.shape[-1:], (width,), ("embed", None), False
            hidden = ACTIVATIONS[self.activation](Dense(config, compute, *settings, name=name)(hidden))
        return hidden

    def flops(self, hidden: int, size: int) -> int:
        """Returns the FLOPs of both dense layers."""
        return 2 * self.size * (hidden + size)


@dataclasses.dataclass(frozen=True)
class WordHead:
    """The choices of the head that predicts words.

    Attributes:
      transform: the layers before the decoder; None: no layers.
      bias: whether the logits have a bias.
      tied: whether the decoder is the table of word embeddings. False: a separate table.
    """

    transform: Transform | None
    bias: bool = True
    tied: bool = True

    @property
    def has_params(self) -> bool:
        """Whether the head has params of its own."""
        return self.transform is not None or self.bias or not self.tied

    def flops(self, config: ModelConfig, predictions: int) -> int:
        """Returns the FLOPs of the matrix products of `predictions` logits in a forward pass (2 per multiply-add)."""
        size = config.embedding_size
        transform = 0 if self.transform is None else self.transform.flops(config.hidden_size, size)
        return predictions * (transform + 2 * size * config.padded_vocab_size)


def word_head_of(config: Any) -> WordHead:
    """Returns the choices of BERT's head for words, from the field `output` of a model config."""
    return {
        "transform": WordHead(dense_transform(config), tied=config.tie_word_embeddings),
        "plain": WordHead(None, bias=False, tied=config.tie_word_embeddings),
    }[config.output]


class MaskedLanguageModelHead(nn.Module):
    """Predicts the words at some positions: a transform to the embedding size, and a decoder."""

    config: ModelConfig
    compute: Compute
    choices: WordHead

    @nn.compact
    def __call__(self, hidden: Array, masked_positions: Array, word_embeddings: Array) -> Array:
        """Returns float32 logits `[batch, predictions, padded vocab]`.

        Args:
          hidden: `[batch, length, hidden]`.
          masked_positions: `[batch, predictions]`.
          word_embeddings: `[padded vocab, embedding_size]`.
        """
        config, compute, choices = self.config, self.compute, self.choices
        hidden = jnp.take_along_axis(hidden, masked_positions[:, :, None], axis=1)
        if choices.transform is not None:
            hidden = choices.transform(config, compute, hidden, config.embedding_size)
        bias = 0.0
        if choices.bias:
            bias_init = partitioned(nn.initializers.zeros, ("vocab",))
            bias = self.param("bias", bias_init, (config.padded_vocab_size,))
        if not choices.tied:
            decoder = Embedding(config, compute.dtype, config.padded_vocab_size, "vocab", name="decoder")
            word_embeddings = decoder.embedding
        return decoded(hidden, word_embeddings, bias, config, compute)


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


class PoolingMode(enum.Enum):
    """The states of a text that the pooled output is computed from.

    Attributes:
      FIRST: the state of the first token.
      LAST: the state of the last token.
      MEAN: the mean state.
      EVERY: all states; the pooled output is the mean of the transformed states.
    """

    FIRST = "first"
    LAST = "last"
    MEAN = "mean"
    EVERY = "every"


@dataclasses.dataclass(frozen=True)
class Pooling:
    """The choices of the pooled output, the input of a classifier of texts.

    Attributes:
      transform: the layers of the pooler; None: no layers.
      mode: the states that the pooled output is computed from.
      dropout: the dropout rate of the states, for texts.
      transforms_tokens: whether the pooler also transforms the input of a classifier of tokens.
    """

    transform: Transform | None = DenseTransform("tanh")
    mode: PoolingMode = PoolingMode.FIRST
    dropout: float = 0.0
    transforms_tokens: bool = False


class TransformStates(nn.Module):
    """A transform as a module."""

    config: ModelConfig
    compute: Compute
    transform: Transform | None

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """`[..., hidden]` -> `[..., hidden]`."""
        if self.transform is None:
            return hidden
        return self.transform(self.config, self.compute, hidden, self.config.hidden_size)


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
