"""The models for pre-training and fine-tuning: an encoder of any family, as `bert`, and an output layer."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.config.model_config import BertConfig, Compute
from bertjax.models import families
from bertjax.models.family import WORD_EMBEDDINGS
from bertjax.nn.attention import Dense
from bertjax.nn.heads import Classifier, MaskedLanguageModelHead, NextSentenceHead, pooled_flops, word_flops
from bertjax.nn.layer_pooling import HIDDEN_STATES, combine, count_layers
from bertjax.nn.lstm import BiLSTM
from bertjax.nn.ops.plain_attention import Cache
from bertjax.nn.ops.segments import join_ends, pool_states


class BertForMaskedLM(nn.Module):
    """An encoder with the masked-LM head, at the masked positions only; without pooler.

    There are next words at these positions if the family says so, or neighbours. One that learns permuted words sees
    none of the tokens at these positions.
    """

    config: BertConfig
    compute: Compute = Compute()

    def setup(self):
        self.bert = families.family_of(self.config).build(self.config, self.compute)
        self.masked_lm = MaskedLanguageModelHead(self.config, self.compute)

    def __call__(self, input_ids, segments, token_types, masked_positions, dropout_keys=None, positions=None):
        """`masked_positions` `[batch, predictions]` -> logits `[batch, predictions, padded vocab]`."""
        given = input_ids, segments, token_types, masked_positions, positions, dropout_keys
        return word_logits(self.bert, self.masked_lm, *self.bert.encode_words(*given))

    def remember(self, input_ids, segments, token_types, masked_positions, memory):
        """As `__call__` of rows that go on after those of a memory; also returns what this then is."""
        hidden, memory = self.bert.encode(input_ids, segments, token_types, memory=memory)
        return word_logits(self.bert, self.masked_lm, hidden, masked_positions), memory

    def decode(self, input_ids, positions, cache: Cache, last):
        """As `BertModel.decode`: the logits of the word after the token `last` of these `[batch, padded vocab]`."""
        hidden, cache = self.bert.decode(input_ids, positions, cache)
        last = jnp.full((input_ids.shape[0], 1), last)
        return self.masked_lm(hidden, last, self.bert.word_embeddings())[:, 0], cache


def word_logits(encoder: nn.Module, head: MaskedLanguageModelHead, hidden, positions):
    """Returns the logits of the words at some positions `[batch, predictions, padded vocab]`."""
    table = encoder.word_embeddings()
    logits = [head(*reader, table) for reader in encoder.readers(hidden, positions)]
    return logits[0] if len(logits) == 1 else jnp.concatenate(logits, axis=1)


class BertForPreTraining(nn.Module):
    """BERT with the heads of `mlm` and `nsp`, as Google and transformers have it. Training composes its own model of
    the heads that are learnt (`objectives.parts.pretraining_model`); with both, its params are these.
    """

    config: BertConfig
    compute: Compute = Compute()

    def setup(self):
        self.bert = families.family_of(self.config).build(self.config, self.compute)
        self.masked_lm = MaskedLanguageModelHead(self.config, self.compute)
        self.next_sentence = NextSentenceHead(self.config)

    def __call__(
        self, input_ids, segments, token_types, masked_positions, dropout_keys=None, positions=None, first_tokens=None
    ):
        """`masked_positions` `[batch, predictions]` -> logits `[batch, predictions, padded vocab]`, `[batch, 2]`.

        With `first_tokens` `[batch, pairs]`, the latter are `[batch, pairs, 2]`.
        """
        hidden, pooled = self.bert(input_ids, segments, token_types, positions, dropout_keys, first_tokens)
        return word_logits(self.bert, self.masked_lm, hidden, masked_positions), self.next_sentence(pooled)


class BertForSequenceClassification(nn.Module):
    """Classifies whole inputs from the pooled output: `[batch, labels]` logits.

    With `first_tokens` `[batch, examples]`, those of several examples of a row: `[batch, examples, labels]`. A single
    label is a regression, or the score of one choice in multiple choice.

    With `lstm_size` there is a BiLSTM instead of the pooler: its states where each direction ends are classified.
    """

    config: BertConfig
    labels: int
    compute: Compute = Compute()
    lstm_size: int = 0
    lstm_layers: int = 1

    def setup(self):
        self.bert = families.family_of(self.config).build(self.config, self.compute)
        self.classifier = Classifier(self.config, self.labels, self.config.pooled_dropout_prob)
        if self.lstm_size:
            self.lstm = BiLSTM(self.config, self.compute.dtype, self.lstm_size, self.lstm_layers)

    def __call__(self, input_ids, segments, token_types, dropout_keys=None, positions=None, first_tokens=None):
        if self.lstm_size:
            hidden = self.bert.encode(input_ids, segments, token_types, positions, dropout_keys)
            pooled = join_ends(self.lstm(hidden, segments, dropout_keys), segments)
        else:
            _, pooled = self.bert(input_ids, segments, token_types, positions, dropout_keys, first_tokens)
        return self.classifier(pooled, dropout_keys)


def _token_states(model: nn.Module, input_ids, segments, token_types, positions, dropout_keys):
    """Returns what a model classifies of each token `[batch, length, width]`: its BiLSTM's states, if it has one."""
    hidden = model.bert.encode(input_ids, segments, token_types, positions, dropout_keys)
    if model.lstm_size:
        return model.lstm(hidden, segments, dropout_keys)
    return model.bert.of_tokens(hidden)


class BertForTokenClassification(nn.Module):
    """Classifies each token: `[batch, length, labels]` logits. With `lstm_size`, a BiLSTM is in between."""

    config: BertConfig
    labels: int
    compute: Compute = Compute()
    lstm_size: int = 0
    lstm_layers: int = 1

    def setup(self):
        self.bert = families.family_of(self.config).build(self.config, self.compute)
        self.classifier = Classifier(self.config, self.labels, self.config.hidden_dropout_prob)
        if self.lstm_size:
            self.lstm = BiLSTM(self.config, self.compute.dtype, self.lstm_size, self.lstm_layers)

    def __call__(self, input_ids, segments, token_types, dropout_keys=None, positions=None):
        hidden = _token_states(self, input_ids, segments, token_types, positions, dropout_keys)
        return self.classifier(hidden, dropout_keys)


class BertForQuestionAnswering(nn.Module):
    """Predicts start and end of an answer span: `[batch, length, 2]` logits. With `lstm_size`, after a BiLSTM."""

    config: BertConfig
    compute: Compute = Compute()
    lstm_size: int = 0
    lstm_layers: int = 1

    def setup(self):
        self.bert = families.family_of(self.config).build(self.config, self.compute)
        self.spans = Classifier(self.config, 2, self.config.spans_dropout_prob)
        if self.lstm_size:
            self.lstm = BiLSTM(self.config, self.compute.dtype, self.lstm_size, self.lstm_layers)

    def __call__(self, input_ids, segments, token_types, dropout_keys=None, positions=None):
        hidden = _token_states(self, input_ids, segments, token_types, positions, dropout_keys)
        return self.spans(hidden, dropout_keys)


class SentenceEncoder(nn.Module):
    """The vector of a text, float32 `[batch, width]`, as sentence-transformers' modules compute it.

    With `first_tokens` `[batch, examples]`, those of several examples of a row: `[batch, examples, width]`.

    Args:
      pooling: which state of a text it is made of: cls, mean or last, see `segments.pool_states`.
      dense: width of a dense layer after it; 0: there is none.
      dense_act: the activation of that layer: none or tanh.
      normalize: whether vectors have length 1.
      truncate_dim: how many of their first numbers are left after that; 0: all.
    """

    config: BertConfig
    compute: Compute = Compute()
    pooling: str = "mean"
    dense: int = 0
    dense_act: str = "none"
    normalize: bool = True
    truncate_dim: int = 0

    def setup(self):
        self.bert = families.family_of(self.config).build(self.config, self.compute)
        if self.dense:
            size = (self.config.hidden_size,)
            self.projection = Dense(self.config, Compute(), size, (self.dense,), ("embed", None))

    def __call__(self, input_ids, segments, token_types, dropout_keys=None, positions=None, first_tokens=None):
        hidden = self.bert.encode(input_ids, segments, token_types, positions, dropout_keys)
        vectors = pool_states(hidden, segments, first_tokens, self.pooling)
        if self.dense:
            vectors = self.projection(vectors)
            vectors = jnp.tanh(vectors) if self.dense_act == "tanh" else vectors
        if self.normalize:
            vectors = unit(vectors)
        return vectors[..., : self.truncate_dim] if self.truncate_dim else vectors


class PooledStates(nn.Module):
    """One state of each text, float32 `[batch, width]`, of an encoder's hidden states; called as `SentenceEncoder`.

    Args:
      layers: which hidden states, a key of `HIDDEN_STATES`.
      pooling: see `segments.pool_states`.
    """

    config: BertConfig
    compute: Compute
    layers: str
    pooling: str

    def setup(self):
        self.bert = families.family_of(self.config).build(self.config, self.compute)

    def __call__(self, input_ids, segments, token_types, dropout_keys=None, positions=None, first_tokens=None):
        states = self.bert.encode(input_ids, segments, token_types, positions, dropout_keys, every_layer=True)
        return pool_states(combine(states, self.layers), segments, first_tokens, self.pooling)


def unit(vectors):
    """Returns vectors divided by their lengths; one of length 0 stays, and has no gradient that is not a number."""
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.square(vectors).sum(-1, keepdims=True), 1e-24))


class BertForFeatureBasedTagging(nn.Module):
    """Classifies each token with a BiLSTM over a frozen BERT: `[batch, length, labels]` logits.

    The feature-based approach of section 5.3; BERT runs without dropout.

    Args:
      layers: a key of `HIDDEN_STATES`.
      lstm_size: size of each direction.
    """

    config: BertConfig
    labels: int
    compute: Compute = Compute()
    layers: str = "concat_last_four"
    lstm_size: int = 768
    lstm_layers: int = 2

    def setup(self):
        self.bert = families.family_of(self.config).build(self.config, self.compute)
        self.lstm = BiLSTM(self.config, self.compute.dtype, self.lstm_size, self.lstm_layers)
        self.classifier = Classifier(self.config, self.labels, self.config.hidden_dropout_prob)
        if HIDDEN_STATES[self.layers].combine == "weighted_sum":
            shape = (count_layers(self.layers, self.config),)
            self.layer_weights = self.param("layer_weights", nn.initializers.zeros, shape)
            self.layer_scale = self.param("layer_scale", nn.initializers.ones, (1,))

    def __call__(self, input_ids, segments, token_types, dropout_keys=None):
        features = self.features(self.bert.encode(input_ids, segments, token_types, every_layer=True))
        return self.classifier(self.lstm(features, segments, dropout_keys), dropout_keys)

    def features(self, states):
        """Combines `[layers + 1, batch, length, hidden]` into the BiLSTM's input `[batch, length, width]`."""
        weights = None
        if HIDDEN_STATES[self.layers].combine == "weighted_sum":
            weights = self.layer_scale * nn.softmax(self.layer_weights)
        return combine(states, self.layers, weights)


def cast_encoder(params: dict, dtype) -> dict:
    """Casts the kernels and the embeddings of the encoder to the compute dtype, which changes no result.

    Output layers stay in float32, because some of them compute in float32.
    """

    def cast(path, leaf):
        names = [entry.key for entry in path]
        return leaf.astype(dtype) if names[0] == "bert" and names[-1] in ("kernel", "embedding") else leaf

    return jax.tree_util.tree_map_with_path(cast, params)


def count_parameters(params, config: BertConfig) -> int:
    """Counts the parameters as papers do: without the rows that pad the vocabulary."""
    padding = config.padded_vocab_size - config.vocab_size

    def count(path, leaf):
        names = tuple(entry.key for entry in path)
        of_words = (WORD_EMBEDDINGS, ("masked_lm", "bias"), ("masked_lm", "decoder", "embedding"))
        if any(names[-len(path) :] == path for path in of_words):
            return leaf.size - padding * math.prod(leaf.shape[1:])
        return leaf.size

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(count, params)))


def lstm_flops(model: nn.Module, batch: int, length: int) -> int:
    """Matrix-multiply FLOPs of one forward pass through the BiLSTM of a model, 0 if it has none."""
    size, width = getattr(model, "lstm_size", 0), model.config.hidden_size
    if not size:
        return 0
    if isinstance(model, BertForFeatureBasedTagging) and HIDDEN_STATES[model.layers].combine == "concat":
        width *= count_layers(model.layers, model.config)
    inputs = [width, *[2 * size] * (model.lstm_layers - 1)]
    return 2 * batch * length * sum(2 * 4 * size * (each + size) for each in inputs)  # two directions, four gates


def forward_flops(config: BertConfig, batch: int, length: int, predictions: int, pooled: int = 1) -> int:
    """Matrix-multiply FLOPs of one forward pass (2 per multiply-add) of `batch` rows.

    `predictions`: words of a row that are predicted. `pooled`: its pooled outputs, each with a head of two classes.

    Computed analytically: XLA's cost analysis counts the body of a scan once. Excludes lookups, norms and softmax, as
    is usual for model FLOPs utilisation (Chowdhery et al. 2022, appendix B). A training step costs three times as many.
    """
    layers = families.family_of(config).forward_flops(config, length)
    return batch * (layers + word_flops(config, predictions) + pooled_flops(config, pooled))
