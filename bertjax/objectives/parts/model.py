"""The model that is pre-trained: an encoder of any family, and the output layers of the objectives."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from bertjax import families
from bertjax.config import BertConfig, Compute
from bertjax.model.dropout import fold_in
from bertjax.objectives import Term


class EncodedBatch(NamedTuple):
    """A batch that the encoder has read.

    Attributes:
      batch: its arrays: `input_ids`, `segments`, `token_types` `[rows, length]`, `pair_labels`, `sequence_weights`
        `[rows]`, what is predicted of words (`word_positions`, `word_ids`, `word_weights` `[rows, predictions]`), and
        what objectives added. In packed batches `segments` numbers the sequences of a row from 1, what is per sequence
        is `[rows, sequences]`, and there are `positions` and `first_tokens` (of each sequence).
      encoder: a module, bound to its params.
      heads: {name: module} of the objective, bound to their params.
      hidden: `[rows, length, hidden]`.
      dropout_keys: `[rows]`; None in evaluation.
      z_loss: weight of what keeps the logits of words small, see `classified`; 0 in evaluation.
    """

    batch: dict
    encoder: nn.Module
    heads: dict[str, nn.Module]
    hidden: jax.Array
    dropout_keys: jax.Array | None
    z_loss: float = 0.0

    def pooled(self) -> jax.Array:
        """Returns the pooled output `[rows, hidden]`, or if sequences share rows `[rows, sequences, hidden]`."""
        return self.encoder.pool(self.hidden, self.batch["segments"], self.batch.get("first_tokens"))


class PretrainingModel(nn.Module):
    """An encoder, as `bert`, and the output layers of what is learnt."""

    config: BertConfig
    terms: tuple[Term, ...]
    compute: Compute = Compute()
    z_loss: float = 0.0

    def setup(self):
        self.bert = families.of(self.config).model(self.config, self.compute)
        heads = {term.name: term.objective.heads(self.config, self.compute) for term in self.terms}
        for name, head in {name: head for each in heads.values() for name, head in each.items()}.items():
            if name in ("bert", "config", "terms", "compute", "z_loss", "head_names"):
                raise ValueError(f"an output layer cannot be called {name!r}")
            setattr(self, name, head)
        self.head_names = {name: tuple(each) for name, each in heads.items()}

    def __call__(self, batch: dict, weights: dict, dropout_keys, keys) -> dict[str, tuple[jax.Array, dict]]:
        """Returns what each objective's `loss` returns, by its name.

        Args:
          weights: by the objectives' names.
          dropout_keys: `[rows]`; None: no dropout.
          keys: `[rows]`, from which each objective gets its own.
        """
        read = (batch[name] for name in ("input_ids", "segments", "token_types"))
        hidden = self.bert.encode(*read, batch.get("positions"), dropout_keys=dropout_keys)
        found, z_loss = {}, 0.0 if dropout_keys is None else self.z_loss
        for number, (name, _, objective) in enumerate(self.terms):
            heads = {head: getattr(self, head) for head in self.head_names[name]}
            encoded = EncodedBatch(batch, self.bert, heads, hidden, dropout_keys, z_loss)
            found[name] = objective.loss(encoded, weights[name], fold_in(keys, number))
        return found


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


def summed_in_parts(function: Callable, arrays, size: int):
    """Returns the sum of a function's results over parts of arrays `[rows, length]`, of `size` columns each.

    Neither the results of a part nor what leads to them is kept: the backward pass computes it again. The last part is
    filled up with zeros, so weights must be among the arrays.
    """
    count = -(-arrays[0].shape[1] // size)

    def parts(x):
        padded = jnp.pad(x, [(0, 0), (0, count * size - x.shape[1])])
        return jnp.moveaxis(padded.reshape(len(x), count, size), 1, 0)

    @jax.checkpoint
    def add(total, part):
        return jax.tree.map(jnp.add, total, function(*part)), None

    each = jax.tree.map(parts, arrays)
    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], each))
    return jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), each)[0]
