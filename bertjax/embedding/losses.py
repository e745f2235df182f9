"""The losses of embeddings.

A loss is called as (embeddings, batch) -> (losses, whether each example is correct). The embeddings are `[rows,
(sequences,) texts, width]`; `texts` are the texts of an example. The loss of an example may depend on the whole batch.
A loss therefore runs with the axis `mesh.GROUPS`, and gathers the rows of other groups of devices over this axis.
`loss_settings` chooses the loss of a run.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from bertjax.distributed.mesh import GROUPS
from bertjax.models.heads import l2_normalize

LOWEST = -1e9  # the logit of an excluded candidate. With -inf, gradients could be NaN.
Tree = TypeVar("Tree")


class FlatBatch(NamedTuple):
    """The examples of a batch, along one axis.

    Attributes:
      embeddings: `[examples, texts, width]` of length 1.
      labels: `[examples, ...]`.
      is_there: `[examples]` booleans, False for padding.
    """

    embeddings: jax.Array
    labels: jax.Array
    is_there: jax.Array


def _local_examples(embeddings: jax.Array, batch: dict) -> FlatBatch:
    """Returns the examples of this group of devices."""
    axes = batch["weights"].ndim  # rows, or rows and their sequences
    embeddings, labels, weights = (
        x.reshape(-1, *x.shape[axes:]) for x in (embeddings, batch["labels"], batch["weights"])
    )
    return FlatBatch(l2_normalize(embeddings), labels, weights > 0)


def _gather(tree: Tree) -> Tree:
    """Returns the examples of all groups of devices, from the examples of this group."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, GROUPS, tiled=True), tree)


def _places(local: FlatBatch) -> jax.Array:
    """Returns the number of each example of this group among the examples of all groups."""
    return jax.lax.axis_index(GROUPS) * len(local.is_there) + jnp.arange(len(local.is_there))


@dataclasses.dataclass(frozen=True)
class InBatchNegatives:
    """The cross-entropy of the positive among all candidates of the batch (InfoNCE), by their cosines.

    An example has a query, a positive, and any number of negatives. Candidates are the positives and negatives of all
    examples, except texts that equal the query or the positive of the example, and positives of the same query.
    `labels` `[..., texts]` are numbers of texts: equal texts have equal numbers.

    Attributes:
      temperature: divides the cosines.
      symmetric: whether to average this loss with the loss of the query among all queries, given the positive.
    """

    temperature: float
    symmetric: bool

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether the positive has the highest cosine; `logits` are embeddings."""
        local, shape = _local_examples(logits, batch), batch["weights"].shape
        gathered, places = _gather(local), _places(local)
        is_other = jnp.arange(len(gathered.is_there)) != places[:, None]
        same_query, same_positive = (local.labels[:, i, None] == gathered.labels[:, i] for i in range(2))
        # `[examples, texts, all examples]`: whether a text of any example equals the query or positive of an example.
        same = (local.labels[:, :2, None, None] == gathered.labels.T).any(1)
        positives, queries = (((same[:, i] | more) & is_other) for i, more in ((1, same_query), (0, same_positive)))
        excluded = same.at[:, 1].set(positives)[:, 1:] | ~gathered.is_there
        candidates = jnp.swapaxes(gathered.embeddings, 0, 1)[1:].reshape(-1, gathered.embeddings.shape[-1])
        cosines = _cosine_matrix(local.embeddings[:, 0], candidates)
        losses, correct = self.cross_entropy(cosines, excluded.reshape(len(places), -1), places)
        if self.symmetric:
            excluded = queries | ~gathered.is_there
            cosines = _cosine_matrix(local.embeddings[:, 1], gathered.embeddings[:, 0])
            back, _ = self.cross_entropy(cosines, excluded, places)
            losses = (losses + back) / 2
        return losses.reshape(shape), correct.reshape(shape)

    def cross_entropy(self, cosines: jax.Array, excluded: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the losses of the examples of this group, and whether the right candidate has the highest cosine.

        Args:
          cosines: the cosines of examples and candidates, `[examples, candidates]`.
          excluded: the candidates without probability, `[examples, candidates]`.
          places: the index of the right candidate, `[examples]`.
        """
        logits = jnp.where(excluded, LOWEST, cosines / self.temperature)
        right = jnp.take_along_axis(logits, places[:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(logits, axis=1) - right, logits.argmax(1) == places


def _cosine_matrix(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the cosines `[n, m]` of embeddings of length 1, `[n, width]` and `[m, width]`."""
    # A bfloat16 product, the default of TPUs, has two digits, which is too few before the division.
    return jnp.matmul(x, y.T, precision="highest")


@dataclasses.dataclass(frozen=True)
class GuidedNegatives(InBatchNegatives):
    """InfoNCE whose false negatives a guide model excludes (GISTEmbed; Solatorio 2024).

    The candidates of a query are all positives, all other queries, and the negatives of all examples. The positive of
    the query is also compared with all other positives. A candidate is excluded if its cosine by the guide is above the
    cosine of the query and its positive by the guide, minus a margin. Equal texts are excluded as in
    `InBatchNegatives`.

    Attributes:
      margin: the margin.
    """

    margin: float

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether the positive has the highest cosine; `logits` are embeddings."""
        local, shape, guide = _local_examples(logits, batch), batch["weights"].shape, batch["guide_embeddings"]
        local_guide = l2_normalize(guide.reshape(-1, *guide.shape[-2:]))
        (gathered, all_guide), places = _gather((local, local_guide)), _places(local)
        is_positive = jnp.arange(len(gathered.is_there)) == places[:, None]
        same_query = local.labels[:, 0, None] == gathered.labels[:, 0]
        same = (local.labels[:, :2, None, None] == gathered.labels.T).any(1)  # as in `InBatchNegatives`
        limits = _cosine_matrix(local_guide[:, 0], all_guide[:, 1])
        limits = jnp.take_along_axis(limits, places[:, None], axis=1) - self.margin
        all_cosines, all_excluded = [], []
        # The texts of an example that are compared with the texts of all examples.
        for text, candidate in ((0, 1), (0, 0), (1, 1), *((0, negative) for negative in range(2, guide.shape[-2]))):
            excluded = _cosine_matrix(local_guide[:, text], all_guide[:, candidate]) > limits
            excluded |= same[:, candidate] | (same_query if candidate == 1 else False)
            excluded &= ~is_positive if (text, candidate) == (0, 1) else True
            all_excluded.append(excluded | ~gathered.is_there)
            all_cosines.append(_cosine_matrix(local.embeddings[:, text], gathered.embeddings[:, candidate]))
        losses, correct = self.cross_entropy(jnp.hstack(all_cosines), jnp.hstack(all_excluded), places)
        return losses.reshape(shape), correct.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Ranking:
    """CoSENT: for two pairs with different scores, the pair with the higher score should have the higher cosine.

    The loss of each example is the loss of the whole batch: log(1 + sum of exp((cosine of the pair with the lower score
    - cosine of the pair with the higher score) / temperature)). `labels` `[...]` are scores in any range, because only
    their order counts. The accuracy is the share of comparisons in which cosines and scores have the same order.
    """

    temperature: float

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the loss, and the share of correct comparisons, for each example; `logits` are embeddings."""
        local, shape = _local_examples(logits, batch), batch["weights"].shape
        cosines = self.similarities(local.embeddings) / self.temperature
        all_cosines, scores, is_there = _gather((cosines, local.labels, local.is_there))
        counts = (local.labels[:, None] < scores) & local.is_there[:, None] & is_there
        differences = jnp.where(counts, cosines[:, None] - all_cosines, LOWEST)
        sums = _gather(jax.nn.logsumexp(differences, axis=1))
        loss = jax.nn.logsumexp(jnp.append(sums, 0.0))
        right, compared = (jax.lax.psum(x.sum(), GROUPS) for x in (counts & (differences < 0), counts))
        return jnp.full(shape, loss), jnp.full(shape, right / jnp.maximum(compared, 1))

    def similarities(self, embeddings: jax.Array) -> jax.Array:
        """Returns the cosine of each pair `[pairs]`, from embeddings `[pairs, 2, width]` of length 1."""
        return cosines_with_first(embeddings)[:, 0]


class AngleRanking(Ranking):
    """AnglE (Li and Li 2024): CoSENT, with a similarity of complex numbers instead of the cosine.

    The first half of an embedding contains real parts, and the second half imaginary parts. The similarity is the
    absolute value of the sum of the real and the imaginary part of the product of one embedding with the conjugate of
    the other embedding. Its gradient does not vanish at the ends of the range of the cosine.
    """

    def similarities(self, embeddings: jax.Array) -> jax.Array:
        """Returns the similarity of each pair `[pairs]`. Embeddings of odd width get a last dimension 0."""
        padded = jnp.pad(embeddings, [(0, 0), (0, 0), (0, embeddings.shape[-1] % 2)])
        real, imaginary = jnp.split(padded, 2, axis=-1)
        sines = (imaginary[:, 0] * real[:, 1] - real[:, 0] * imaginary[:, 1]).sum(-1)
        return jnp.abs(super().similarities(embeddings) + sines)


@dataclasses.dataclass(frozen=True)
class Contrastive:
    """The contrastive loss (Hadsell et al. 2006), of the distance 1 - cosine. `labels` `[...]` are 1 or 0.

    The loss decreases the distance of texts with label 1, and increases the distance of texts with label 0 up to a
    margin.
    """

    margin: float

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether each label is predicted correctly; `logits` are embeddings.

        A distance below half of the margin predicts the label 1.
        """
        local, shape = _local_examples(logits, batch), batch["weights"].shape
        distances, is_same = 1 - cosines_with_first(local.embeddings)[:, 0], local.labels == 1
        losses = self.pair_losses(distances, is_same, local.is_there)
        return losses.reshape(shape), ((distances < self.margin / 2) == is_same).reshape(shape)

    def pair_losses(self, distances: jax.Array, is_same: jax.Array, is_there: jax.Array) -> jax.Array:
        """Returns the losses of the pairs of this group of devices.

        Args:
          distances: the distances of the texts of each pair, `[pairs]`.
          is_same: whether each pair has label 1, `[pairs]`.
          is_there: see `FlatBatch`.
        """
        del is_there
        return self._squares(distances, is_same) / 2

    def _squares(self, distances: jax.Array, is_same: jax.Array) -> jax.Array:
        return jnp.square(jnp.where(is_same, distances, jax.nn.relu(self.margin - distances)))


class OnlineContrastive(Contrastive):
    """The contrastive loss of the hard pairs of the batch (OnlineContrastiveLoss of sentence-transformers).

    A pair with label 1 is hard if its distance is above the least distance of all pairs with label 0. A pair with
    label 0 is hard if its distance is below the largest distance of all pairs with label 1. If all pairs of the batch
    have the same label, the mean distance is the limit. The loss of the batch is the sum over all hard pairs.
    """

    def pair_losses(self, distances: jax.Array, is_same: jax.Array, is_there: jax.Array) -> jax.Array:
        """Returns the loss of each pair times the number of pairs, so that the mean over the batch is a sum."""
        all_distances, all_same, all_there = _gather((distances, is_same, is_there))
        positives, negatives = all_same & all_there, ~all_same & all_there
        mean = jnp.where(all_there, all_distances, 0).sum() / jnp.maximum(all_there.sum(), 1)
        farthest = jnp.where(positives, all_distances, -jnp.inf).max()
        nearest = jnp.where(negatives, all_distances, jnp.inf).min()
        above = jnp.where(negatives.any(), nearest, mean)
        below = jnp.where(positives.any(), farthest, mean)
        is_hard = jnp.where(is_same, distances > above, distances < below)
        return jnp.where(is_hard, self._squares(distances, is_same), 0) * all_there.sum()


@dataclasses.dataclass(frozen=True)
class Triplet:
    """The triplet loss: max(distance of query and positive - distance of query and negative + margin, 0).

    The loss of an example with several negatives is the mean over its negatives.

    Attributes:
      distance_metric: a name of `DISTANCES`. Only the cosine distance ignores the lengths of embeddings.
      margin: the least difference of distances without a loss.
    """

    distance_metric: str
    margin: float

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether the positive is nearer than all negatives; `logits` are embeddings."""
        del batch
        distances = DISTANCES[self.distance_metric](logits[..., :1, :], logits[..., 1:, :])
        differences = distances[..., :1] - distances[..., 1:]
        return jax.nn.relu(differences + self.margin).mean(-1), (differences < 0).all(-1)


def _cosine_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    return 1 - (l2_normalize(x) * l2_normalize(y)).sum(-1)


def _euclidean_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    squares = jnp.square(x - y).sum(-1)
    # The derivative of the square root at 0 is infinite. Places without an example have the distance 0.
    return jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)


def _manhattan_distance(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.abs(x - y).sum(-1)


DISTANCES: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "cosine": _cosine_distance,
    "euclidean": _euclidean_distance,
    "manhattan": _manhattan_distance,
}


def cosines_with_first(embeddings: jax.Array) -> jax.Array:
    """Returns the cosines of the first text of each example with the other texts of the example.

    Args:
      embeddings: `[..., texts, width]` of length 1.

    Returns:
      `[..., texts - 1]`.
    """
    return (embeddings[..., :1, :] * embeddings[..., 1:, :]).sum(-1)
