"""The model that is pre-trained: an encoder of any family, and the output layers of the objectives."""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from bertjax.config.model_config import BertConfig, Compute
from bertjax.models import families
from bertjax.nn.ops.dropout import fold_in, random_bits
from bertjax.nn.ops.recurrent_memory import Memory
from bertjax.objectives.encoded_batch import EncodedBatch
from bertjax.objectives.objective import Term


class PretrainingModel(nn.Module):
    """An encoder, as `bert`, and the output layers of what is learnt."""

    config: BertConfig
    terms: tuple[Term, ...]
    compute: Compute = Compute()
    z_loss: float = 0.0

    def setup(self):
        self.bert = families.family_of(self.config).build(self.config, self.compute)
        heads = {term.name: term.objective.heads(self.config, self.compute) for term in self.terms}
        for name, head in {name: head for each in heads.values() for name, head in each.items()}.items():
            if name in ("bert", "config", "terms", "compute", "z_loss", "head_names"):
                raise ValueError(f"an output layer cannot be called {name!r}")
            setattr(self, name, head)
        self.head_names = {name: tuple(each) for name, each in heads.items()}

    def __call__(self, batch: dict, weights: dict, dropout_keys, keys) -> tuple[dict[str, tuple], Memory | None]:
        """Returns what each objective's `loss`, or `rewrite`, returns, by its name, of auxiliary ones if there is
        `progress` in the batch; and what the rows remember, if the batch has a `memory`.

        Args:
          weights: by the objectives' names.
          dropout_keys: `[rows]`; None: no dropout.
          keys: `[rows]`, from which each objective gets its own.
        """
        encoded = EncodedBatch(batch, self.bert, {}, None, dropout_keys, 0.0 if dropout_keys is None else self.z_loss)
        heads = {term.name: {name: getattr(self, name) for name in self.head_names[term.name]} for term in self.terms}
        own = {term.name: fold_in(keys, number) for number, term in enumerate(self.terms)}
        found = {}
        for name, _, objective in self.terms:
            if objective.rewrite:
                given = encoded._replace(heads=heads[name])
                encoded, found[name] = objective.rewrite(given, weights[name], own[name])
        learnt = [term for term in self.terms if "progress" in encoded.batch or not term.objective.is_auxiliary]
        encoded, memory = _read(encoded, learnt)
        for name, _, objective in learnt:
            if not objective.rewrite:
                given = encoded._replace(heads=heads[name])
                found[name] = objective.loss(given, weights[name], own[name])
        return found, memory


def _read(encoded: EncodedBatch, terms: Sequence[Term]) -> tuple[EncodedBatch, Memory | None]:
    """Has the encoder read the batch as what is learnt says; also returns what rows that go on remember then."""
    batch, encode, keys = encoded.batch, encoded.encoder.encode, dict(dropout_keys=encoded.dropout_keys)
    arrays, memory = [batch[name] for name in ("input_ids", "segments", "token_types")], None
    if "memory" in batch:
        memory = batch["memory"].where(batch["goes_on"] > 0)
    own = next((term.objective.encode for term in terms if term.objective.encode), None)
    if own or memory is not None:
        if own:
            hidden, of_words, memory = own(encoded.encoder, batch, encoded.dropout_keys, memory)
        else:
            (hidden, memory), of_words = encode(*arrays, memory=memory, **keys), None
        if memory is not None:  # rows whose record is lost leave nothing
            memory = memory.where(batch["segments"][:, 0] > 0)
        return encoded._replace(hidden=hidden, of_words=of_words), memory
    if any(term.objective.is_auxiliary for term in terms):
        states = encode(*arrays, batch.get("positions"), every_layer=True, **keys)
        return encoded._replace(states=states, hidden=states[-1]), None
    return encoded._replace(hidden=encode(*arrays, batch.get("positions"), **keys)), None


def classified(logits: jax.Array, labels: jax.Array, weights: jax.Array, z_loss: float = 0.0) -> tuple[jax.Array, dict]:
    """Returns the weighted sums of the cross-entropy, and of the correct predictions as `accuracy`.

    Args:
      logits: `[..., classes]`.
      labels, weights: `[...]`.
      z_loss: adds so many times log(Z)^2, Z the sum that the softmax divides by (Chowdhery et al. 2022, section 5).
    """
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if z_loss:
        losses += z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))
    correct = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0] >= logits.max(-1)  # argmax is slow on CPU
    return (weights * losses).sum(), {"accuracy": (weights * correct).sum()}


def drawn(logits: jax.Array, keys: jax.Array, start: int | jax.Array = 0) -> jax.Array:
    """Draws from the softmax of logits `[rows, predictions, words]`: int32 `[rows, predictions]`, without a gradient.

    It is where the logits and Gumbel noise have the largest sum. The noise is a function of the rows' keys and of the
    index of a logit in its row, of which `start` is the first one's.
    """
    bits = jax.vmap(lambda key: random_bits(key, logits.shape[1:], start))(keys)
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23  # has 2 ** 23 values, neither 0 nor 1
    return jnp.argmax(jax.lax.stop_gradient(logits) - jnp.log(-jnp.log(uniform)), axis=-1).astype(jnp.int32)


def summed_in_parts(function: Callable, arrays, size: int):
    """Applies a function to parts of arrays `[rows, length]`, of `size` columns each.

    Args:
      function: part of the arrays -> (what is summed, arrays `[rows, size]`).

    Returns the sums, and the arrays joined, `[rows, length]`. Neither what is summed nor what leads to it is kept: the
    backward pass computes it again. The last part is filled up with zeros, so weights must be among the arrays.
    """
    length = arrays[0].shape[1]
    count = -(-length // size)

    def parts(x):
        padded = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])])
        return jnp.moveaxis(padded.reshape(len(x), count, size), 1, 0)

    @jax.checkpoint
    def add(total, part):
        found, own = function(*part)
        return jax.tree.map(jnp.add, total, found), own

    def joined(x):
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)[:, :length]

    each = jax.tree.map(parts, arrays)
    shapes, _ = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], each))
    total, own = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), each)
    return total, jax.tree.map(joined, own)
