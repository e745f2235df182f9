"""The base class of the encoders of all families: from token ids to hidden states and a pooled output."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from bertjax.config.model_config import BertConfig, Compute, ModelConfig
from bertjax.nn.architecture import Architecture
from bertjax.nn.attention import Attention
from bertjax.nn.embeddings import TokenEmbeddings, embeddings_of
from bertjax.nn.encoder import Encoder
from bertjax.nn.heads import Pooler, PoolingMode, TransformStates, states_of_tokens
from bertjax.nn.layers import Layer
from bertjax.nn.norm import Normalize
from bertjax.nn.ops.dropout import dropout, fold_in
from bertjax.nn.ops.plain_attention import KeyValueCache, visible
from bertjax.nn.ops.segments import last_tokens, mean_of_segments


class MaskedPredictions(NamedTuple):
    """The predicted tokens of rows, and the order of their predictions. See `TransformerModel.encode_compensated`.

    Attributes:
      places: `[batch, predictions]`, the places of the predicted tokens in the row.
      ids: `[batch, predictions]`, the token ids in place of the predicted tokens, such as [MASK].
      ranks: `[batch, predictions]`, the order of the predictions of a segment, 1, 2, ...; 0 for padding.
      token_ranks: `[batch, length]`, the ranks of all tokens; 0 for tokens that are not predicted.
    """

    places: Array
    ids: Array
    ranks: Array
    token_ranks: Array


class EncoderModel(nn.Module):
    """Embeddings, layers, and a pooler. Params are float32.

    A family overrides `make_layers`, and each other method whose default does not fit.
    """

    config: ModelConfig
    compute: Compute = Compute()

    def setup(self) -> None:
        """Builds the submodules."""
        self.embeddings = self.make_embeddings()
        self.encoder = self.make_layers()
        self.pooler = self.make_pooler()

    def make_embeddings(self) -> Any:
        """Returns the embeddings, a module that `embed` calls. The default has the embeddings of BERT."""
        return TokenEmbeddings(self.config, self.compute, embeddings_of(cast(BertConfig, self.config)))

    def make_layers(self) -> Any:
        """Returns the layers, a module that `apply_layers` calls.

        The module maps embeddings `[batch, length, hidden]`, `segments`, `dropout_keys` and `every_layer` to the hidden
        states of the last layer in the same shape, or with `every_layer` to all hidden states `[layers, batch, length,
        hidden]`.
        """
        raise NotImplementedError

    def make_pooler(self) -> Any:
        """Returns the pooler, a module that `pool` calls. The default has BERT's tanh."""
        return Pooler(self.config, self.compute)

    def __call__(
        self,
        input_ids: Array,
        segments: Array,
        token_types: Array,
        positions: Array | None = None,
        dropout_keys: Array | None = None,
        first_tokens: Array | None = None,
    ) -> tuple[Array, Array]:
        """Returns the hidden states `[batch, length, hidden]` and the pooled output `[batch, hidden]`.

        Args:
          input_ids: see `encode`.
          segments: see `encode`.
          token_types: see `encode`.
          positions: see `encode`.
          dropout_keys: see `encode`.
          first_tokens: `[batch, examples]`, the first token of each example of a packed row. The pooled output then is
            `[batch, examples, hidden]`.
        """
        hidden = self.encode(input_ids, segments, token_types, positions, dropout_keys=dropout_keys)
        return hidden, self.pool(self.pooler_input(hidden, dropout_keys), segments, first_tokens)

    def pooler_input(self, hidden: Array, dropout_keys: Array | None) -> Array:
        """Returns the hidden states that `pool` reads. The default is `hidden`; some families apply dropout."""
        return hidden

    def encode(
        self,
        input_ids: Array,
        segments: Array,
        token_types: Array,
        positions: Array | None = None,
        dropout_keys: Array | None = None,
        *,
        every_layer: bool = False,
    ) -> Array:
        """Returns the hidden states of the last layer `[batch, length, hidden]`.

        Args:
          input_ids: token ids `[batch, length]`.
          segments: `[batch, length]`; 0 is padding. Tokens attend only within their segment. A packed row contains
            several examples as segments 1, 2, ...; Google's `input_mask` is a row of one segment.
          token_types: `[batch, length]`; 0 in sentence A, 1 in sentence B (Google's `segment_ids`).
          positions: indices of the position embeddings `[batch, length]`; None: 0, 1, ..., length - 1.
          dropout_keys: random keys `[batch]`, one per row; None: no dropout.
          every_layer: return the embeddings and the hidden states of all layers, `[layers + 1, batch, length, hidden]`.
        """
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        x = self.embed(input_ids, token_types, positions, dropout_keys)
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        hidden = self.apply_layers(x, positions, segments, dropout_keys, every_layer)
        return jnp.concatenate([x[None], hidden]) if every_layer else hidden

    def embed(self, input_ids: Array, token_types: Array, positions: Array, dropout_keys: Array | None) -> Array:
        """Returns the embeddings `[batch, length, hidden]`; arguments as in `encode`."""
        return self.embeddings(input_ids, token_types, positions, fold_in(dropout_keys, 0))

    def apply_layers(
        self, x: Array, positions: Array, segments: Array, dropout_keys: Array | None, every_layer: bool
    ) -> Array:
        """Returns the hidden states after the layers, see `make_layers`."""
        return self.encoder(x, segments, dropout_keys, every_layer=every_layer)

    def encode_words(
        self,
        input_ids: Array,
        segments: Array,
        token_types: Array,
        places: Array,
        positions: Array | None = None,
        dropout_keys: Array | None = None,
    ) -> tuple[Array, Array]:
        """Returns the hidden states that predict tokens, and their positions `[batch, predictions]`.

        The default returns the hidden states and `places`.

        Args:
          input_ids: see `encode`. There is a [MASK] at each place.
          segments: see `encode`.
          token_types: see `encode`.
          places: `[batch, predictions]`, the positions of the tokens to predict.
          positions: see `encode`.
          dropout_keys: see `encode`.
        """
        return self.encode(input_ids, segments, token_types, positions, dropout_keys), places

    def encode_permuted(
        self,
        input_ids: Array,
        segments: Array,
        token_types: Array,
        places: Array,
        seen: Array,
        positions: Array | None = None,
        dropout_keys: Array | None = None,
        memory: Any = None,
    ) -> tuple[Array, Array, Any]:
        """Returns the hidden states of both streams, if the `lm_type` of the family is permuted.

        Args:
          input_ids: see `encode`.
          segments: see `encode`.
          token_types: see `encode`.
          places: `[batch, predictions]`, the positions of the tokens to predict.
          seen: booleans `[batch, length or 1, length]`: the tokens that each position sees. A hidden state also sees
            its token; a hidden state that predicts a token does not.
          positions: see `encode`.
          dropout_keys: see `encode`.
          memory: the `RecurrentMemory` of earlier tokens, which all positions see; None: no memory.

        Returns:
          The hidden states `[batch, length, hidden]`; the hidden states that predict the tokens at `places`, `[batch,
          predictions, hidden]`; and the next memory, or None.
        """
        raise NotImplementedError

    def word_embeddings(self) -> Array:
        """Returns the table that the head for words shares, `[padded vocab, embedding_size]`."""
        return self.embeddings.word.embedding

    def prediction_states(self, hidden: Array, positions: Array) -> Iterable[tuple[Array, Array]]:
        """Returns pairs of hidden states and the positions `[batch, ...]` that are predicted from these states.

        The default is one pair. An encoder with two directions returns a pair for each direction.
        """
        return [(hidden, positions)]

    def token_states(self, hidden: Array) -> Array:
        """Returns the input of a token classifier, `[batch, length, hidden]`. The default is `hidden`."""
        return hidden

    def pool(self, hidden: Array, segments: Array, first_tokens: Array | None) -> Array:
        """Returns the pooled output. The default pools the first token of each example."""
        return self.pooler(hidden, first_tokens)


def layer_inputs(model: EncoderModel, params: dict, ids: Array, segments: Array, token_types: Array) -> Array:
    """Returns the inputs of all layers `[layers, batch, length, hidden]`.

    Args:
      model: an unbound encoder.
      params: the params of the encoder.
      ids: token ids `[batch, length]`.
      segments: `[batch, length]`.
      token_types: `[batch, length]`.
    """
    states = model.apply({"params": params}, ids, segments, token_types, every_layer=True, method="encode")
    return jnp.asarray(states)[:-1]


class TransformerModel(EncoderModel):
    """A Transformer encoder with the choices of an `Architecture`.

    A family with other layers overrides `make_layers`.

    Attributes:
      config: the model config.
      compute: the settings of the computation.
      architecture: the choices.
    """

    architecture: Architecture = dataclasses.field(kw_only=True)

    def setup(self) -> None:
        """Builds the submodules, and the params of the term of the attention scores."""
        super().setup()
        bias = self.architecture.score_bias
        self.score_table = None if bias is None else bias.table(self, self.config)

    def make_embeddings(self) -> nn.Module:
        """Returns the embeddings."""
        return TokenEmbeddings(self.config, self.compute, self.architecture.embeddings)

    def make_layers(self) -> Encoder:
        """Returns the layers."""
        return Encoder(self.config, self.compute, self.architecture.layers)

    def make_pooler(self) -> nn.Module:
        """Returns the pooler."""
        return TransformStates(self.config, self.compute, self.architecture.pooling.transform)

    def apply_layers(
        self, x: Array, positions: Array, segments: Array, dropout_keys: Array | None, every_layer: bool
    ) -> Array:
        """Returns the hidden states after the layers."""
        bias = self.score_bias(x.shape[1])
        return self.encoder(x, segments, dropout_keys, positions, every_layer=every_layer, score_bias=bias)

    def score_bias(self, length: int) -> Array | None:
        """Returns a term of the attention scores of all layers, float32 `[heads, queries, keys]`; None: no term."""
        bias = self.architecture.score_bias
        return None if bias is None else bias.scores(self.score_table, self.config.num_attention_heads, length)

    def encode_compensated(
        self,
        input_ids: Array,
        segments: Array,
        token_types: Array,
        predictions: MaskedPredictions,
        positions: Array | None = None,
        dropout_keys: Array | None = None,
    ) -> tuple[Array, Array]:
        """Returns the hidden states of both streams of masked and permuted language modelling (Song et al. 2020).

        A mask follows the row for each predicted token. It has the position of this token. Each state attends to every
        position of its segment: to the token if the state may see the token, and otherwise to the mask. Tokens that are
        not predicted, and masks, see the tokens that are not predicted. A predicted token also sees itself and the
        tokens before it in the order. The second stream consists of a second copy of the masks. Such a state predicts a
        token: it sees the tokens before this token in the order, and no state attends to it.

        Args:
          input_ids: see `encode`. The tokens are not masked.
          segments: see `encode`.
          token_types: see `encode`.
          predictions: the predicted tokens.
          positions: see `encode`.
          dropout_keys: see `encode`.

        Returns:
          The hidden states `[batch, length, hidden]`, and the hidden states of the second stream `[batch, predictions,
          hidden]`.
        """
        attentions = [layer.attention for layer in self.architecture.layers]
        if any(not isinstance(x, Attention) or x.window is not None or x.causal for x in attentions):
            raise NotImplementedError("a mask for each row needs attention without windows and without causal masks")
        places, ids, ranks, token_ranks = predictions
        length, count = input_ids.shape[1], places.shape[1]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(length), input_ids.shape)

        def extended(x: Array, of_masks: Array | None = None) -> Array:
            of_masks = jnp.take_along_axis(x, places, axis=1) if of_masks is None else of_masks
            return jnp.concatenate([x, of_masks, of_masks], axis=1)

        # Masks of padding are in the segment of padding, to which no token of the text attends.
        masked_segments = jnp.where(ranks > 0, jnp.take_along_axis(segments, places, axis=1), 0)
        all_segments, all_positions = extended(segments, masked_segments), extended(positions)
        # A state sees the tokens before its own rank, and itself if it is a token.
        own_ranks = jnp.concatenate([token_ranks, jnp.zeros_like(ranks), ranks], axis=1)
        is_self = jnp.eye(length + 2 * count, length, dtype=bool)
        sees = (token_ranks == 0)[:, None] | (token_ranks[:, None] < own_ranks[:, :, None]) | is_self
        sees_masks = ~jnp.take_along_axis(sees, places[:, None], axis=2) & (ranks > 0)[:, None]
        mask = jnp.concatenate([sees, sees_masks], axis=2)
        mask &= visible(all_segments)[:, 0, :, : length + count]

        x = self.embed(extended(input_ids, ids), extended(token_types), all_positions, dropout_keys)
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        bias, choices = None, self.architecture.score_bias
        if choices is not None:
            distances = all_positions[:, None, : length + count] - all_positions[:, :, None]
            bias = choices.of_distances(self.score_table, self.config.num_attention_heads, distances)
        hidden = self.encoder(x, all_segments, dropout_keys, all_positions, score_bias=bias, mask=mask)
        return hidden[:, :length], hidden[:, length + count :]

    def pooler_input(self, hidden: Array, dropout_keys: Array | None) -> Array:
        """Returns the hidden states with the dropout before the pooler."""
        # `heads.Classifier` uses the keys without the second `fold_in` for its dropout.
        keys = fold_in(fold_in(dropout_keys, self.config.num_hidden_layers + 1), 0)
        return dropout(hidden, self.architecture.pooling.dropout, keys)

    def pool(self, hidden: Array, segments: Array, first_tokens: Array | None) -> Array:
        """Returns the pooled output, see `Pooling`."""
        mode = self.architecture.pooling.mode
        if mode in (PoolingMode.FIRST, PoolingMode.LAST):
            tokens = last_tokens(segments, first_tokens) if mode == PoolingMode.LAST else first_tokens
            return self.pooler(states_of_tokens(hidden, tokens))
        firsts = jnp.zeros((hidden.shape[0], 1), jnp.int32) if first_tokens is None else first_tokens
        # The mean of logits is the logits of the mean: the transformed states are averaged before the classifier.
        if mode == PoolingMode.EVERY:
            pooled = mean_of_segments(self.pooler(hidden), segments, firsts)
        else:
            pooled = self.pooler(mean_of_segments(hidden, segments, firsts))
        return pooled[:, 0] if first_tokens is None else pooled

    def token_states(self, hidden: Array) -> Array:
        """Returns the input of a token classifier, `[batch, length, hidden]`."""
        return self.pooler(hidden) if self.architecture.pooling.transforms_tokens else hidden

    def decode(self, input_ids: Array, positions: Array, cache: KeyValueCache) -> tuple[Array, KeyValueCache]:
        """Runs a causal model on tokens that follow the tokens in a cache.

        Args:
          input_ids: `[batch, length]`.
          positions: consecutive positions `[length]`, equal in all rows.
          cache: keys and values of the earlier tokens, see `Decodes.new_cache`.

        Returns:
          Hidden states `[batch, length, hidden]`, and the cache with the new tokens added.

        Raises:
          NotImplementedError: if the attention has a choice that `cached_attention` does not have.
        """
        if self.architecture.score_bias is not None:
            raise NotImplementedError("attention with a cache has no term of the scores")
        row_positions = jnp.broadcast_to(positions, input_ids.shape)
        x = self.embeddings(input_ids, jnp.zeros_like(input_ids), row_positions)
        return self.encoder(x, positions, positions=row_positions, cache=cache)

    def shared_inputs(self, input_ids: Array, segments: Array, token_types: Array) -> Any:
        """Returns the inputs that all layers share, without dropout; arguments as in `encode`."""
        positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        x = self.embed(input_ids, token_types, positions, None)
        return self.encoder.shared_inputs(x, segments, positions, self.score_bias(input_ids.shape[1]))

    @nn.nowrap
    def attention_probabilities(self, params: dict, ids: Array, segments: Array, token_types: Array) -> Array:
        """Returns attention probabilities `[layers, heads, queries, keys]`, see `ExposesAttention`."""
        config, compute, layers = self.config, Compute(), self.architecture.layers
        model = self.clone(compute=compute)
        inputs = layer_inputs(model, params, ids, segments, token_types)
        shared = model.apply({"params": params}, ids, segments, token_types, method="shared_inputs")

        def of_layer(layer: Layer, params: dict, x: Array) -> Array:
            if layer.positions is not None:
                table = layer.positions.module(config, compute, config.hidden_size, "position")
                x = x + cast(Array, table.apply({"params": params.get("position", {})}, cast(Any, shared).positions))

            def norm(name: str) -> Any:
                normalize = Normalize(layer.norm, config.hidden_size, compute)
                return lambda x: normalize.apply({"params": params[name]}, x)

            attention = layer.attention.module(config, compute)
            variables, x = {"params": params["attention"]}, layer.residual.attention_input(norm, x)
            return cast(Array, attention.apply(variables, x, shared, method="probabilities"))[0]

        by_layer = zip(layers, layers.by_layer(params["encoder"]), inputs, strict=True)
        return jnp.stack([of_layer(*arguments) for arguments in by_layer])
