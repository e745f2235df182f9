"""The losses of the vectors of texts.

Each is a function (vectors, batch) -> (losses, whether each example is correct), of vectors
`[rows, (sequences,) texts, width]`, where `texts` are those of an example. What it says of an example depends on the
whole batch, so that it runs where the step does: with the axis `mesh.GROUPS`, over which it gathers the rows of others.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bertjax.families.with_heads import unit
from bertjax.sharding.mesh import GROUPS

LOWEST = -1e9  # a logit that gets no probability, and no gradient that is not a number


class Coupled(NamedTuple):
    """The examples of a batch: `own` is of this group of devices, `all` of all groups; of examples, one axis.

    Attributes:
      vectors: `[examples, texts, width]` of length 1.
      labels: `[examples, ...]`.
      is_there: `[examples]`: false for places that no example has.
    """

    vectors: jax.Array
    labels: jax.Array
    is_there: jax.Array


def _coupled(vectors, batch: dict) -> tuple[Coupled, Coupled]:
    """Returns the examples of this group of devices, and those of all groups."""
    shape, labels = batch["weights"].shape, batch["labels"]
    texts, width = vectors.shape[-2:]
    own = Coupled(
        unit(vectors.reshape(-1, texts, width)),
        labels.reshape(-1, *labels.shape[len(shape) :]),
        batch["weights"].reshape(-1) > 0,
    )
    return own, jax.tree.map(lambda x: jax.lax.all_gather(x, GROUPS, tiled=True), own)


def _places(own: Coupled) -> jax.Array:
    """Returns the number of each own example among all."""
    return jax.lax.axis_index(GROUPS) * len(own.is_there) + jnp.arange(len(own.is_there))


@dataclasses.dataclass(frozen=True)
class InBatchNegatives:
    """The cross-entropy of the positive among all candidates of the batch (InfoNCE), by their cosines.

    An example has a query, its positive, and any negatives of its own; candidates are the positives and negatives of
    all examples, but for those with the same text as the example's positive, and positives of the same query.
    `labels` `[..., texts]` are numbers of texts: equal ones are the same text.

    Args:
      temperature: divides the cosines.
      symmetric: the mean of this loss and that of the query among all queries, given the positive.
    """

    temperature: float = 0.05
    symmetric: bool = False

    def __call__(self, vectors, batch: dict) -> tuple[jax.Array, jax.Array]:
        own, every = _coupled(vectors, batch)
        places, shape = _places(own), batch["weights"].shape
        # [texts - 1, examples] of each: the positives come first, then the first negatives, ...
        candidates, numbers = (jnp.moveaxis(x[:, 1:], 0, 1) for x in (every.vectors, every.labels))
        texts, examples, width = candidates.shape
        same_query = own.labels[:, :1] == every.labels[:, 0]
        is_other = jnp.arange(examples) != places[:, None]
        excluded = own.labels[:, 1, None] == numbers.reshape(-1)
        excluded |= jnp.pad(same_query, ((0, 0), (0, (texts - 1) * examples)))
        excluded &= jnp.pad(is_other, ((0, 0), (0, (texts - 1) * examples)), constant_values=True)
        excluded |= ~jnp.tile(every.is_there, texts)
        logits = own.vectors[:, 0] @ candidates.reshape(-1, width).T / self.temperature
        losses, correct = _cross_entropy(jnp.where(excluded, LOWEST, logits), places)
        if self.symmetric:
            same = same_query | (own.labels[:, 1, None] == every.labels[:, 1])
            logits = own.vectors[:, 1] @ every.vectors[:, 0].T / self.temperature
            back, _ = _cross_entropy(jnp.where((same & is_other) | ~every.is_there, LOWEST, logits), places)
            losses = (losses + back) / 2
        return losses.reshape(shape), correct.reshape(shape)


def _cross_entropy(logits, places) -> tuple[jax.Array, jax.Array]:
    right = jnp.take_along_axis(logits, places[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - right, logits.argmax(1) == places


@dataclasses.dataclass(frozen=True)
class Ranking:
    """CoSENT: of any two pairs with different scores, the cosine of the one with the higher score is to be higher.

    The loss is log(1 + sum of exp((cosine of the lower - cosine of the higher) / temperature)), of the whole batch;
    each example has it. `labels` `[...]` are scores.
    """

    temperature: float = 0.05

    def __call__(self, vectors, batch: dict) -> tuple[jax.Array, jax.Array]:
        _, every = _coupled(vectors, batch)
        cosines = (every.vectors[:, 0] * every.vectors[:, 1]).sum(-1) / self.temperature
        counts = (every.labels[:, None] < every.labels) & every.is_there[:, None] & every.is_there
        differences = jnp.where(counts, cosines[:, None] - cosines, LOWEST)
        loss = jax.nn.logsumexp(jnp.append(differences.ravel(), 0.0))
        right = (counts & (differences < 0)).sum() / jnp.maximum(counts.sum(), 1)  # share of the comparisons
        shape = batch["weights"].shape
        return jnp.full(shape, loss), jnp.full(shape, right)


@dataclasses.dataclass(frozen=True)
class Contrastive:
    """Pulls the texts of pairs with label 1 together, and those with label 0 apart, up to a margin of 1 - cosine
    (Hadsell et al. 2006). `labels` `[...]` are 1 or 0."""

    margin: float = 0.5

    def __call__(self, vectors, batch: dict) -> tuple[jax.Array, jax.Array]:
        own, _ = _coupled(vectors, batch)
        distances = 1 - (own.vectors[:, 0] * own.vectors[:, 1]).sum(-1)
        is_same, beyond = own.labels == 1, jax.nn.relu(self.margin - distances)
        losses = jnp.where(is_same, jnp.square(distances), jnp.square(beyond)) / 2
        shape = batch["weights"].shape
        return losses.reshape(shape), ((distances < self.margin / 2) == is_same).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Matryoshka:
    """The sum of a loss of the first so many numbers of the vectors, for several widths (Kusupati et al. 2022)."""

    loss: Callable
    widths: tuple[int, ...]

    def __call__(self, vectors, batch: dict) -> tuple[jax.Array, jax.Array]:
        found = [self.loss(vectors[..., :width], batch) for width in self.widths]
        widest = max(range(len(found)), key=lambda i: self.widths[i])
        return sum(losses for losses, _ in found), found[widest][1]


@dataclasses.dataclass(frozen=True)
class ByForm:
    """The loss of a batch by the form of its examples, which its labels show: of numbers of texts, one for each text;
    of a score, which is no whole number; of a label, which is."""

    of_texts: Callable
    of_score: Callable
    of_label: Callable

    def __call__(self, vectors, batch: dict) -> tuple[jax.Array, jax.Array]:
        labels = batch["labels"]
        if labels.ndim > batch["weights"].ndim:
            return self.of_texts(vectors, batch)
        return (self.of_score if jnp.issubdtype(labels.dtype, jnp.floating) else self.of_label)(vectors, batch)


def of_settings(settings, widths: Sequence[int]) -> Callable:
    """Returns the loss of `config.loss`."""
    losses = (
        InBatchNegatives(settings.temperature, settings.symmetric),
        Ranking(settings.temperature),
        Contrastive(settings.margin),
    )
    return ByForm(*(Matryoshka(loss, tuple(widths)) if widths else loss for loss in losses))
