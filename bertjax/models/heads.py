"""Models for pre-training and fine-tuning: an encoder of any family, and a head.

The params of the encoder have the name `bert` in all families. `EncoderModel.encode` documents the arguments of the
models.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import Compute, ModelConfig
from bertjax.models import families
from bertjax.models.family import WORD_EMBEDDINGS
from bertjax.nn.dense import Dense
from bertjax.nn.heads import Classifier, MaskedLanguageModelHead, NextSentenceHead, pooled_flops
from bertjax.nn.layer_pooling import HIDDEN_STATES, combine, count_layers
from bertjax.nn.lstm import BiLSTM
from bertjax.nn.ops.plain_attention import KeyValueCache
from bertjax.nn.ops.recurrent_memory import RecurrentMemory
from bertjax.nn.ops.segments import join_ends, pool_states


class BertForMaskedLM(nn.Module):
    """An encoder and a language-model head, which computes logits only at the positions `masked_positions`.

    The `lm_type` of the family determines the predicted token: the token at a position, or the next token. With
    `lm_type` permuted, no state sees the tokens at `masked_positions`.
    """

    config: ModelConfig
    compute: Compute = Compute()

    def setup(self) -> None:
        """Builds the submodules."""
        self.bert = families.encoder_of(self.config, self.compute)
        self.masked_lm = masked_lm_head(self.config, self.compute)

    def __call__(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        masked_positions: jax.Array,
        dropout_keys: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits `[batch, predictions, padded vocab]` at `masked_positions` `[batch, predictions]`."""
        states, places = self.bert.encode_words(
            input_ids, segments, token_types, masked_positions, positions, dropout_keys
        )
        return word_logits(self.bert, self.masked_lm, states, places)

    def predict_with_memory(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        masked_positions: jax.Array,
        memory: RecurrentMemory,
    ) -> tuple[jax.Array, RecurrentMemory]:
        """Returns logits `[batch, predictions, padded vocab]` and the next memory, for causal families."""
        encoder: Any = self.bert
        hidden, memory = encoder.encode(input_ids, segments, token_types, memory=memory)
        return word_logits(encoder, self.masked_lm, hidden, masked_positions), memory

    def decode(
        self, input_ids: jax.Array, positions: jax.Array, cache: KeyValueCache, last: jax.Array | int
    ) -> tuple[jax.Array, KeyValueCache]:
        """Returns the logits `[batch, padded vocab]` of the token after position `last`, and the next cache.

        Args:
          input_ids: see `TransformerModel.decode`.
          positions: see `TransformerModel.decode`.
          cache: see `TransformerModel.decode`.
          last: the position in `input_ids` of the last token, the same in all rows. Padding may follow.
        """
        hidden, cache = self.bert.decode(input_ids, positions, cache)
        places = jnp.full((input_ids.shape[0], 1), last)
        return self.masked_lm(hidden, places, self.bert.word_embeddings())[:, 0], cache


def masked_lm_head(config: ModelConfig, compute: Compute) -> MaskedLanguageModelHead:
    """Returns the head that predicts words, with the choices of the family of a config."""
    return MaskedLanguageModelHead(config, compute, families.family_of(config).word_head(config))


def word_logits(encoder: Any, head: Any, hidden: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns logits at some positions, `[batch, predictions, padded vocab]`.

    Args:
      encoder: a bound `EncoderModel`.
      head: a bound `MaskedLanguageModelHead`.
      hidden: hidden states `[batch, length, hidden]`.
      positions: positions in `hidden`, `[batch, predictions]`.
    """
    table = encoder.word_embeddings()
    logits = [head(states, places, table) for states, places in encoder.prediction_states(hidden, positions)]
    return logits[0] if len(logits) == 1 else jnp.concatenate(logits, axis=1)


class BertForPreTraining(nn.Module):
    """An encoder with a masked-LM head and a next-sentence head, as in Google's code and transformers.

    Pre-training with `mlm + nsp` uses the module `objectives.parts.pretraining_model`, which has the same params.
    """

    config: ModelConfig
    compute: Compute = Compute()

    def setup(self) -> None:
        """Builds the submodules."""
        self.bert = families.encoder_of(self.config, self.compute)
        self.masked_lm = masked_lm_head(self.config, self.compute)
        self.next_sentence = NextSentenceHead(self.config)

    def __call__(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        masked_positions: jax.Array,
        dropout_keys: jax.Array | None = None,
        positions: jax.Array | None = None,
        first_tokens: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns masked-LM logits `[batch, predictions, padded vocab]` and next-sentence logits `[batch, 2]`.

        With `first_tokens` `[batch, pairs]`, the next-sentence logits are `[batch, pairs, 2]`.
        """
        hidden, pooled = self.bert(input_ids, segments, token_types, positions, dropout_keys, first_tokens)
        return word_logits(self.bert, self.masked_lm, hidden, masked_positions), self.next_sentence(pooled)


class BertForSequenceClassification(nn.Module):
    """Classifies the pooled output of a text.

    One label is the target of a regression, or the score of a choice in multiple choice. With `lstm_size`, a BiLSTM
    replaces the pooler, and the input of the classifier is the last state of both directions.
    """

    config: ModelConfig
    labels: int
    compute: Compute = Compute()
    lstm_size: int = 0
    lstm_layers: int = 1

    def setup(self) -> None:
        """Builds the submodules."""
        self.bert = families.encoder_of(self.config, self.compute)
        self.classifier = Classifier(self.config, self.labels, self.config.pooled_dropout_prob)
        if self.lstm_size:
            self.lstm = BiLSTM(self.config, self.compute.dtype, self.lstm_size, self.lstm_layers)

    def __call__(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        dropout_keys: jax.Array | None = None,
        positions: jax.Array | None = None,
        first_tokens: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits `[batch, labels]`; with `first_tokens` `[batch, examples]`, `[batch, examples, labels]`."""
        if self.lstm_size:
            hidden = self.bert.encode(input_ids, segments, token_types, positions, dropout_keys)
            pooled = join_ends(self.lstm(hidden, segments, dropout_keys), segments)
        else:
            _, pooled = self.bert(input_ids, segments, token_types, positions, dropout_keys, first_tokens)
        return self.classifier(pooled, dropout_keys)


def _token_states(model: Any, hidden: jax.Array, segments: jax.Array, dropout_keys: jax.Array | None) -> jax.Array:
    """Returns the hidden states of the BiLSTM, or of the encoder, for a token classifier: `[batch, length, width]`."""
    return model.lstm(hidden, segments, dropout_keys) if model.lstm_size else model.bert.token_states(hidden)


class BertForTokenClassification(nn.Module):
    """Classifies each token. With `lstm_size`, there is a BiLSTM between the encoder and the classifier."""

    config: ModelConfig
    labels: int
    compute: Compute = Compute()
    lstm_size: int = 0
    lstm_layers: int = 1

    def setup(self) -> None:
        """Builds the submodules."""
        self.bert = families.encoder_of(self.config, self.compute)
        self.classifier = Classifier(self.config, self.labels, self.config.hidden_dropout_prob)
        if self.lstm_size:
            self.lstm = BiLSTM(self.config, self.compute.dtype, self.lstm_size, self.lstm_layers)

    def __call__(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        dropout_keys: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits `[batch, length, labels]`."""
        hidden = self.bert.encode(input_ids, segments, token_types, positions, dropout_keys)
        return self.classifier(_token_states(self, hidden, segments, dropout_keys), dropout_keys)


class BertForQuestionAnswering(nn.Module):
    """Predicts the start and the end of an answer.

    With `lstm_size`, there is a BiLSTM between the encoder and the classifier.
    """

    config: ModelConfig
    compute: Compute = Compute()
    lstm_size: int = 0
    lstm_layers: int = 1

    def setup(self) -> None:
        """Builds the submodules."""
        self.bert = families.encoder_of(self.config, self.compute)
        self.spans = Classifier(self.config, 2, self.config.spans_dropout_prob)
        if self.lstm_size:
            self.lstm = BiLSTM(self.config, self.compute.dtype, self.lstm_size, self.lstm_layers)

    def __call__(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        dropout_keys: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits `[batch, length, 2]`."""
        hidden = self.bert.encode(input_ids, segments, token_types, positions, dropout_keys)
        return self.spans(_token_states(self, hidden, segments, dropout_keys), dropout_keys)


class SentenceEncoder(nn.Module):
    """Computes the embedding of a text: pooling, a dense layer and normalization, as in sentence-transformers.

    Attributes:
      config: the model config.
      compute: see `ModelFamily.build`.
      pooling: cls, mean or last, see `segments.pool_states`.
      dense: the width of a dense layer after the pooling; 0 for no dense layer.
      dense_act: the activation of the dense layer: none or tanh.
      normalize: whether to scale embeddings to unit L2 norm.
      truncate_dim: the number of elements that are kept after the normalization; 0 for all.
    """

    config: ModelConfig
    compute: Compute = Compute()
    pooling: str = "mean"
    dense: int = 0
    dense_act: str = "none"
    normalize: bool = True
    truncate_dim: int = 0

    def setup(self) -> None:
        """Builds the submodules."""
        self.bert = families.encoder_of(self.config, self.compute)
        if self.dense:
            size = (self.config.hidden_size,)
            self.projection = Dense(self.config, Compute(), size, (self.dense,), ("embed", None))

    def __call__(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        dropout_keys: jax.Array | None = None,
        positions: jax.Array | None = None,
        first_tokens: jax.Array | None = None,
    ) -> jax.Array:
        """Returns float32 embeddings `[batch, width]`.

        With `first_tokens` `[batch, examples]`, the embeddings are `[batch, examples, width]`.
        """
        hidden = self.bert.encode(input_ids, segments, token_types, positions, dropout_keys)
        embeddings = pool_states(hidden, segments, first_tokens, self.pooling)
        if self.dense:
            embeddings = self.projection(embeddings)
            embeddings = jnp.tanh(embeddings) if self.dense_act == "tanh" else embeddings
        if self.normalize:
            embeddings = l2_normalize(embeddings)
        return embeddings[..., : self.truncate_dim] if self.truncate_dim else embeddings


class PooledStates(nn.Module):
    """Computes one pooled state per text from a combination of layers.

    Attributes:
      config: the model config.
      compute: see `ModelFamily.build`.
      layers: the combination of layers, a key of `layer_pooling.HIDDEN_STATES`.
      pooling: see `segments.pool_states`.
    """

    config: ModelConfig
    compute: Compute
    layers: str
    pooling: str

    def setup(self) -> None:
        """Builds the submodules."""
        self.bert = families.encoder_of(self.config, self.compute)

    def __call__(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        dropout_keys: jax.Array | None = None,
        positions: jax.Array | None = None,
        first_tokens: jax.Array | None = None,
    ) -> jax.Array:
        """Returns float32 states `[batch, width]`, or with `first_tokens` `[batch, examples, width]`."""
        states = self.bert.encode(input_ids, segments, token_types, positions, dropout_keys, every_layer=True)
        return pool_states(combine(states, self.layers), segments, first_tokens, self.pooling)


def l2_normalize(vectors: jax.Array) -> jax.Array:
    """Scales vectors `[..., width]` to unit L2 norm. A zero vector stays zero and has a finite gradient."""
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.square(vectors).sum(-1, keepdims=True), 1e-24))


class BertForFeatureBasedTagging(nn.Module):
    """Classifies each token with a BiLSTM over a frozen encoder without dropout (Devlin et al. 2019, section 5.3).

    Attributes:
      config: the model config.
      labels: the number of labels.
      compute: see `ModelFamily.build`.
      layers: the combination of layers, a key of `layer_pooling.HIDDEN_STATES`.
      lstm_size: the hidden size of one direction of the BiLSTM.
      lstm_layers: the number of layers of the BiLSTM.
    """

    config: ModelConfig
    labels: int
    compute: Compute = Compute()
    layers: str = "concat_last_four"
    lstm_size: int = 768
    lstm_layers: int = 2

    def setup(self) -> None:
        """Builds the submodules."""
        self.bert = families.encoder_of(self.config, self.compute)
        self.lstm = BiLSTM(self.config, self.compute.dtype, self.lstm_size, self.lstm_layers)
        self.classifier = Classifier(self.config, self.labels, self.config.hidden_dropout_prob)
        if HIDDEN_STATES[self.layers].combine == "weighted_sum":
            shape = (count_layers(self.layers, self.config),)
            self.layer_weights = self.param("layer_weights", nn.initializers.zeros, shape)
            self.layer_scale = self.param("layer_scale", nn.initializers.ones, (1,))

    def __call__(
        self,
        input_ids: jax.Array,
        segments: jax.Array,
        token_types: jax.Array,
        dropout_keys: jax.Array | None = None,
    ) -> jax.Array:
        """Returns logits `[batch, length, labels]`."""
        features = self.features(self.bert.encode(input_ids, segments, token_types, every_layer=True))
        return self.classifier(self.lstm(features, segments, dropout_keys), dropout_keys)

    def features(self, states: jax.Array) -> jax.Array:
        """Returns the input of the BiLSTM `[batch, length, width]`.

        Args:
          states: the embeddings and the hidden states of all layers, `[layers + 1, batch, length, hidden]`.
        """
        weights = None
        if HIDDEN_STATES[self.layers].combine == "weighted_sum":
            weights = self.layer_scale * nn.softmax(self.layer_weights)
        return combine(states, self.layers, weights)


def cast_encoder(params: dict, dtype: str) -> dict:
    """Casts kernels and embeddings of the encoder to the compute dtype. Results do not change.

    Params of heads stay in float32, because some heads compute in float32.
    """

    def cast(path: tuple, leaf: jax.Array) -> jax.Array:
        names = [entry.key for entry in path]
        return leaf.astype(dtype) if names[0] == "bert" and names[-1] in ("kernel", "embedding") else leaf

    return jax.tree_util.tree_map_with_path(cast, params)


def count_parameters(params: dict, config: ModelConfig) -> int:
    """Returns the number of parameters, without the rows that pad the vocabulary."""
    padding = config.padded_vocab_size - config.vocab_size

    def count(path: tuple, leaf: jax.Array) -> int:
        names = tuple(entry.key for entry in path)
        padded = (WORD_EMBEDDINGS, ("masked_lm", "bias"), ("masked_lm", "decoder", "embedding"))
        if any(names[-len(suffix) :] == suffix for suffix in padded):
            return leaf.size - padding * math.prod(leaf.shape[1:])
        return leaf.size

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(count, params)))


def lstm_flops(model: Any, batch: int, length: int) -> int:
    """Returns the FLOPs of the forward pass of a model's BiLSTM; 0 if the model has no BiLSTM.

    Args:
      model: a module of this file.
      batch: the number of rows.
      length: the number of tokens in a row.
    """
    size, width = getattr(model, "lstm_size", 0), model.config.hidden_size
    if not size:
        return 0
    if isinstance(model, BertForFeatureBasedTagging) and HIDDEN_STATES[model.layers].combine == "concat":
        width *= count_layers(model.layers, model.config)
    input_sizes = [width, *[2 * size] * (model.lstm_layers - 1)]
    macs_per_token = sum(2 * 4 * size * (inputs + size) for inputs in input_sizes)  # two directions, four gates
    return 2 * batch * length * macs_per_token


def model_flops(config: ModelConfig, batch: int, length: int, predictions: int, pooled: int = 1) -> int:
    """Returns the FLOPs of the matrix products in a forward pass. A multiply-add counts as two FLOPs.

    The number is analytic, because XLA's cost analysis counts the body of a scan once. Embedding lookups, norms and
    softmax are excluded, as is usual for model FLOPs utilization (Chowdhery et al. 2022, appendix B). A training step
    has three times the FLOPs.

    Args:
      config: the model config.
      batch: the number of rows.
      length: the number of tokens in a row.
      predictions: the number of predicted tokens in a row.
      pooled: the number of pooled outputs in a row. A head with two classes is included.
    """
    family = families.family_of(config)
    words = family.word_head(config).flops(config, predictions)
    return batch * (family.forward_flops(config, length) + words + pooled_flops(config, pooled))
