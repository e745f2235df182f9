"""The losses of the vectors of texts.

Each is a function (vectors, batch) -> (losses, whether each example is correct), of vectors
`[rows, (sequences,) texts, width]`, where `texts` are those of an example. What it says of an example may depend on the
whole batch, so that it runs where the step does: with the axis `mesh.GROUPS`, over which it gathers the rows of others.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from bertjax.distributed.mesh import GROUPS
from bertjax.models.heads import l2_normalize

LOWEST = -1e9  # a logit that gets no probability, and no gradient that is not a number


class FlatBatch(NamedTuple):
    """The examples of a batch, along one axis.

    Attributes:
      vectors: `[examples, texts, width]` of length 1.
      labels: `[examples, ...]`.
      is_there: `[examples]`: false for places that no example has.
    """

    vectors: jax.Array
    labels: jax.Array
    is_there: jax.Array


def _own(vectors, batch: dict) -> FlatBatch:
    """Returns the examples of this group of devices."""
    axes = batch["weights"].ndim  # rows, or rows and their sequences
    vectors, labels, weights = (x.reshape(-1, *x.shape[axes:]) for x in (vectors, batch["labels"], batch["weights"]))
    return FlatBatch(l2_normalize(vectors), labels, weights > 0)


def _of_all(x):
    """Returns the examples of all groups of devices, of those of each."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, GROUPS, tiled=True), x)


def _places(own: FlatBatch) -> jax.Array:
    """Returns the number of each own example among all."""
    return jax.lax.axis_index(GROUPS) * len(own.is_there) + jnp.arange(len(own.is_there))


@dataclasses.dataclass(frozen=True)
class InBatchNegatives:
    """The cross-entropy of the positive among all candidates of the batch (InfoNCE), by their cosines.

    An example has a query, its positive, and any negatives of its own; candidates are the positives and negatives of
    all examples, but for those with the text of the example's query or positive, and positives of the same query.
    `labels` `[..., texts]` are numbers of texts: equal ones are the same text.

    Args:
      temperature: divides the cosines.
      symmetric: the mean of this loss and that of the query among all queries, given the positive.
    """

    temperature: float
    symmetric: bool

    def __call__(self, vectors, batch: dict) -> tuple[jax.Array, jax.Array]:
        own, shape = _own(vectors, batch), batch["weights"].shape
        every, places = _of_all(own), _places(own)
        is_other = jnp.arange(len(every.is_there)) != places[:, None]
        same_query, same_positive = (own.labels[:, i, None] == every.labels[:, i] for i in range(2))
        # `[examples, texts, examples of all]`: which texts of all are the query or the positive of an example.
        same = (own.labels[:, :2, None, None] == every.labels.T).any(1)
        positives, queries = (((same[:, i] | more) & is_other) for i, more in ((1, same_query), (0, same_positive)))
        excluded = same.at[:, 1].set(positives)[:, 1:] | ~every.is_there
        candidates = jnp.swapaxes(every.vectors, 0, 1)[1:].reshape(-1, every.vectors.shape[-1])
        losses, correct = self._cross_entropy(own.vectors[:, 0], candidates, excluded.reshape(len(places), -1), places)
        if self.symmetric:
            excluded = queries | ~every.is_there
            back, _ = self._cross_entropy(own.vectors[:, 1], every.vectors[:, 0], excluded, places)
            losses = (losses + back) / 2
        return losses.reshape(shape), correct.reshape(shape)

    def _cross_entropy(self, vectors, candidates, excluded, places) -> tuple[jax.Array, jax.Array]:
        # With bfloat16 products, as of TPUs, the temperature would divide cosines of two digits.
        cosines = jnp.matmul(vectors, candidates.T, precision="highest")
        logits = jnp.where(excluded, LOWEST, cosines / self.temperature)
        right = jnp.take_along_axis(logits, places[:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(logits, axis=1) - right, logits.argmax(1) == places


@dataclasses.dataclass(frozen=True)
class Ranking:
    """CoSENT: of any two pairs with different scores, the cosine of the one with the higher score is to be higher.

    The loss is log(1 + sum of exp((cosine of the lower - cosine of the higher) / temperature)), of the whole batch;
    each example has it. `labels` `[...]` are scores, in any range: their order counts. Correct is the share of the
    comparisons that the cosines decide as the scores do.
    """

    temperature: float

    def __call__(self, vectors, batch: dict) -> tuple[jax.Array, jax.Array]:
        own, shape = _own(vectors, batch), batch["weights"].shape
        cosines = _cosines(own.vectors)[:, 0] / self.temperature
        every, scores, is_there = _of_all((cosines, own.labels, own.is_there))
        counts = (own.labels[:, None] < scores) & own.is_there[:, None] & is_there
        differences = jnp.where(counts, cosines[:, None] - every, LOWEST)
        sums = _of_all(jax.nn.logsumexp(differences, axis=1))
        loss = jax.nn.logsumexp(jnp.append(sums, 0.0))
        right, compared = (jax.lax.psum(x.sum(), GROUPS) for x in (counts & (differences < 0), counts))
        return jnp.full(shape, loss), jnp.full(shape, right / jnp.maximum(compared, 1))


@dataclasses.dataclass(frozen=True)
class Contrastive:
    """Pulls the texts of pairs with label 1 together, and those with label 0 apart, up to a margin of 1 - cosine
    (Hadsell et al. 2006). `labels` `[...]` are 1 or 0."""

    margin: float

    def __call__(self, vectors, batch: dict) -> tuple[jax.Array, jax.Array]:
        own, shape = _own(vectors, batch), batch["weights"].shape
        distances, is_same = 1 - _cosines(own.vectors)[:, 0], own.labels == 1
        losses = jnp.square(jnp.where(is_same, distances, jax.nn.relu(self.margin - distances))) / 2
        return losses.reshape(shape), ((distances < self.margin / 2) == is_same).reshape(shape)


def _cosines(vectors):
    """Returns the cosine of the first text of each example with each of its others, `[..., texts, width]` of length 1
    -> `[..., texts - 1]`."""
    return (vectors[..., :1, :] * vectors[..., 1:, :]).sum(-1)


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

    @staticmethod
    def divergence(vectors, theirs, temperature: float) -> jax.Array:
        """Returns how far the vectors of each example are from what a teacher says of it.

        Args:
          theirs: its vectors, `[..., texts, width]`: the mean of 1 - cosine, for vectors of length 1 half their squared
            distance; or their scores, `[..., texts - 1]`: the mean squared error, MarginMSE (Hofstätter et al. 2020).
          temperature: of no effect: these are numbers.
        """
        del temperature
        if theirs.ndim == vectors.ndim:
            return 1 - (l2_normalize(vectors) * l2_normalize(theirs)).sum(-1).mean(-1)
        return jnp.square(scores_of(vectors) - theirs).mean(-1)


def scores_of(vectors):
    """Returns the scores of examples, `[..., texts, width]` -> `[..., texts - 1]`: by how much the cosine of the query
    with its positive is above that with each negative, and, without negatives, that cosine `[..., 1]`."""
    cosines = _cosines(l2_normalize(vectors))
    return cosines if cosines.shape[-1] == 1 else cosines[..., :1] - cosines[..., 1:]


@dataclasses.dataclass(frozen=True)
class Matryoshka:
    """The sum of a loss of the vectors, and of their first so many numbers, for several widths (Kusupati et al. 2022).

    Correct is what is so by the whole vectors.
    """

    loss: ByForm
    widths: tuple[int, ...]

    def __call__(self, vectors, batch: dict) -> tuple[jax.Array, jax.Array]:
        found = [self.loss(vectors[..., :width], batch) for width in self._all(vectors)]
        return sum(losses for losses, _ in found), found[0][1]

    def divergence(self, vectors, theirs, temperature: float) -> jax.Array:
        """As that of the loss; vectors of a teacher are shortened, too."""
        has_vectors = theirs.ndim == vectors.ndim
        return sum(
            self.loss.divergence(vectors[..., :width], theirs[..., :width] if has_vectors else theirs, temperature)
            for width in self._all(vectors)
        )

    def _all(self, vectors) -> list[int]:
        return sorted({vectors.shape[-1], *self.widths}, reverse=True)


def of_settings(settings, widths: Sequence[int]) -> ByForm | Matryoshka:
    """Returns the loss of `config.loss`."""
    loss = ByForm(
        InBatchNegatives(settings.temperature, settings.symmetric),
        Ranking(settings.temperature),
        Contrastive(settings.margin),
    )
    return Matryoshka(loss, tuple(widths)) if widths else loss
