"""The model of pre-training: an encoder of any family, and the heads of the objectives."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from bertjax.config.model_config import BertConfig, Compute
from bertjax.models import families
from bertjax.nn.ops.dropout import fold_in, random_bits
from bertjax.nn.ops.recurrent_memory import encode_with_memory
from bertjax.objectives.encoded_batch import EncodedBatch
from bertjax.objectives.objective import AuxiliaryObjective, JointModel, QueryStream, Term

# Names of attributes of `PretrainingModel`, which a head cannot have.
RESERVED_MODULE_NAMES = ("bert", "config", "terms", "compute", "z_loss", "head_names")


class PretrainingModel(nn.Module):
    """An encoder, as `bert`, and the heads of the objectives.

    Attributes:
      config: the config of the encoder.
      terms: the objectives. The index of a term derives the random keys of its objective.
      compute: the settings of the computation, such as the dtype.
      z_loss: the weight of the z-loss in training, see `weighted_cross_entropy`.
    """

    config: BertConfig
    terms: tuple[Term, ...]
    compute: Compute = Compute()
    z_loss: float = 0.0

    def setup(self) -> None:
        """Makes the encoder and the heads. Objectives that return the same name share the head."""
        self.bert = families.family_of(self.config).build(self.config, self.compute)
        heads = {term.name: term.objective.heads(self.config, self.compute) for term in self.terms}
        for name, head in {name: head for layers in heads.values() for name, head in layers.items()}.items():
            if name in RESERVED_MODULE_NAMES:
                raise ValueError(f"head {name!r}: the name is reserved; rename the head in `heads` of the objective")
            setattr(self, name, head)
        self.head_names = {name: tuple(layers) for name, layers in heads.items()}

    def __call__(
        self, batch: dict, weights: dict, dropout_keys: jax.Array | None, keys: jax.Array
    ) -> tuple[dict[str, tuple[jax.Array, dict]], Any]:
        """Returns {objective: (loss, metrics)}, and the next carry if the batch has a `carry`, else None.

        Omits auxiliary objectives if the batch has no `progress`.

        Args:
          batch: the arrays of the batch, `[rows, ...]`.
          weights: {objective: weights of its predictions}.
          dropout_keys: `[rows]` random keys; None for no dropout.
          keys: `[rows]` random keys, from which the keys of each objective are derived.
        """
        z_loss = 0.0 if dropout_keys is None else self.z_loss
        encoded = EncodedBatch(batch, self.bert, {}, None, dropout_keys, z_loss)
        heads = {term.name: {name: getattr(self, name) for name in self.head_names[term.name]} for term in self.terms}
        objective_keys: dict[str, Any] = {term.name: fold_in(keys, number) for number, term in enumerate(self.terms)}
        for name, _, objective in self.terms:
            if isinstance(objective, JointModel):
                encoded = encoded._replace(heads=heads[name])
                encoded = objective.rewrite(encoded, weights[name], objective_keys[name])
        has_progress = "progress" in encoded.batch
        terms = [term for term in self.terms if has_progress or not isinstance(term.objective, AuxiliaryObjective)]
        encoded, carry = _encode(encoded, terms)
        losses = {}
        for name, _, objective in terms:
            inputs = encoded._replace(heads=heads[name])
            losses[name] = objective.loss(inputs, weights[name], objective_keys[name])
        return losses, carry


def _encode(encoded: EncodedBatch, terms: Sequence[Term]) -> tuple[EncodedBatch, Any]:
    """Runs the encoder. Returns the batch with the hidden states, and the carry for the next step or None."""
    batch, encoder, keys = encoded.batch, encoded.encoder, encoded.dropout_keys
    arrays, positions = [batch[name] for name in ("input_ids", "segments", "token_types")], batch.get("positions")
    stream = next((term.objective for term in terms if isinstance(term.objective, QueryStream)), None)
    carry = None
    if stream is not None:
        read = functools.partial(stream.encode, encoder, batch, keys)
        hidden, query_states, carry = encode_with_memory(read, batch) if "carry" in batch else read()
        encoded = encoded._replace(hidden=hidden, query_states=query_states)
    elif "carry" in batch:
        read = functools.partial(encoder.encode, *arrays, dropout_keys=keys)
        hidden, carry = encode_with_memory(lambda memory: read(memory=memory), batch)
        encoded = encoded._replace(hidden=hidden)
    elif any(isinstance(term.objective, AuxiliaryObjective) for term in terms):
        states = encoder.encode(*arrays, positions, every_layer=True, dropout_keys=keys)
        encoded = encoded._replace(layer_states=states, hidden=states[-1])
    else:
        encoded = encoded._replace(hidden=encoder.encode(*arrays, positions, dropout_keys=keys))
    return encoded, carry


def weighted_cross_entropy(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, z_loss: float = 0.0
) -> tuple[jax.Array, dict]:
    """Returns the weighted sum of the cross-entropy, and {"accuracy": weighted sum of the correct predictions}.

    Args:
      logits: `[..., classes]`.
      labels: `[...]`.
      weights: `[...]`.
      z_loss: the factor of log(Z)^2, which is added to the loss; Z is the denominator of the softmax (Chowdhery et al.
        2022, section 5).
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if z_loss:
        losses += z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
    correct = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0] >= logits.max(-1)  # argmax is slow on CPU
    return (weights * losses).sum(), {"accuracy": (weights * correct).sum()}


def sample_tokens(logits: jax.Array, keys: jax.Array, start: int | jax.Array = 0) -> jax.Array:
    """Samples tokens from the softmax of logits: int32 `[rows, predictions]`, without a gradient.

    The sample is the index of the largest sum of a logit and Gumbel noise. The noise is a function of the key of the
    row and of the index of the logit in the row.

    Args:
      logits: `[rows, predictions, words]`.
      keys: `[rows]` random keys.
      start: the index of the first logit in its row, if the logits are a chunk.
    """
    bits = jax.vmap(lambda key: random_bits(key, logits.shape[1:], start))(keys)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # has 2 ** 23 values, neither 0 nor 1
    return jnp.argmax(jax.lax.stop_gradient(logits) - jnp.log(-jnp.log(uniform)), axis=-1).astype(jnp.int32)


def sum_in_chunks(function: Callable, arrays: Sequence[jax.Array], size: int) -> tuple:
    """Applies a function to chunks of columns, one at a time. The backward pass recomputes the intermediate values.

    Args:
      function: chunks `[rows, size]` of the arrays -> (values to sum over the chunks, arrays `[rows, size]`).
      arrays: arrays `[rows, length]`. The last chunk is padded with zeros, so that one of the arrays must be weights.
      size: the number of columns of a chunk.

    Returns:
      The sums, and the concatenated arrays `[rows, length]`.
    """
    length = arrays[0].shape[1]
    count = -(-length // size)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])])
        return jnp.moveaxis(padded.reshape(len(x), count, size), 1, 0)

    @jax.checkpoint
    def add(total: tuple, part: tuple) -> tuple:
        sums, columns = function(*part)
        return jax.tree.map(jnp.add, total, sums), columns

    def joined(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length]

    chunks = jax.tree.map(split, arrays)
    shapes, _ = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], chunks))
    total, columns = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), chunks)
    return total, jax.tree.map(joined, columns)
