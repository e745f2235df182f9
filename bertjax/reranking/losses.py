"""The losses of rerankers, which compute one score for a pair of a query and a document.

A loss is called as (logits, batch) -> (losses, whether each pair is correct), see `inference.losses.LabelLoss`. The
logits are `[rows, (sequences,) 1]`: a row contains pairs. `batch["labels"]` are float32 `[rows, (sequences,) 3]`: for
each pair the index of the list in the batch, the position of the document in the list (from 0), and the grade of the
document.

A pointwise loss depends on one pair. A loss of lists depends on all pairs of a list. These pairs are in the same batch,
but can belong to different groups of devices. A loss of lists therefore runs with the axis `mesh.GROUPS`, and gathers
the pairs of all groups over this axis.
"""

import abc
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from bertjax.config import limits
from bertjax.distributed.mesh import GROUPS
from bertjax.inference.losses import CouplesRows, LabelLoss

LOWEST = -1e9  # a logit without probability, whose gradient is a number
LIST, POSITION, GRADE = range(3)  # the columns of a label


@dataclasses.dataclass(frozen=True)
class BinaryCrossEntropy:
    """The cross-entropy of grades between 0 and 1, as torch's `BCEWithLogitsLoss(pos_weight)`.

    Attributes:
      positive_weight: the weight of the positive part of the loss.
    """

    positive_weight: float = 1.0

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether the probability and the grade are on the same side of 0.5."""
        scores, grades = _scores_and_grades(logits, batch)
        positive, negative = jax.nn.log_sigmoid(scores), jax.nn.log_sigmoid(-scores)
        losses = -self.positive_weight * grades * positive - (1 - grades) * negative
        return losses, (scores > 0) == (grades > 0.5)


@dataclasses.dataclass(frozen=True)
class MSE:
    """The squared error of scores, for grades in any range. Errors below 0.5 are correct."""

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether each score is correct."""
        scores, grades = _scores_and_grades(logits, batch)
        return jnp.square(scores - grades), jnp.abs(scores - grades) < 0.5


def _scores_and_grades(logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
    return logits[..., 0].astype(jnp.float32), batch["labels"][..., GRADE]


class Lists(NamedTuple):
    """The documents of a batch by list, `[lists, documents]`. Places without a document contain 0.

    Attributes:
      scores: the scores of the model.
      grades: the relevance of the documents, or the scores of a teacher.
      is_there: false for places without a document.
    """

    scores: jax.Array
    grades: jax.Array
    is_there: jax.Array

    def sort(self, keys: jax.Array) -> "Lists":
        """Sorts the documents of each list by descending keys `[lists, documents]`. Equal keys keep their order.

        Places without a document are last.
        """
        order = jnp.argsort(jnp.where(self.is_there, -keys, jnp.inf), axis=1, stable=True)
        return Lists(*(jnp.take_along_axis(x, order, axis=1) for x in self))

    def log_probs(self, logits: jax.Array) -> jax.Array:
        """Returns log-probabilities of the documents of each list, from logits; all are `[lists, documents]`.

        Places without a document have the probability 0, and a very low finite number as log-probability.
        """
        return jax.nn.log_softmax(jnp.where(self.is_there, logits, LOWEST), axis=1)

    def sum(self, values: jax.Array) -> jax.Array:
        """Returns the sums `[lists]` of values `[lists, documents]` over the documents of each list."""
        return jnp.where(self.is_there, values, 0).sum(1)

    def mean(self, losses: jax.Array) -> jax.Array:
        """Returns the mean of `[lists]` losses over the lists that have documents; 0 without lists."""
        has_documents = self.is_there.any(1)
        return jnp.where(has_documents, losses, 0).sum() / jnp.maximum(has_documents.sum(), 1)

    def are_correct(self) -> jax.Array:
        """Returns `[lists]` booleans: whether all documents with the highest score have the highest grade."""
        has_top_score, has_top_grade = (
            values == jnp.where(self.is_there, values, -jnp.inf).max(1, keepdims=True)
            for values in (self.scores, self.grades)
        )
        return (has_top_grade | ~has_top_score | ~self.is_there).all(1)


@dataclasses.dataclass(frozen=True)
class ListLoss(CouplesRows):
    """A loss of lists. The loss of each pair is the loss of the whole batch.

    A weighted mean over the pairs is therefore the loss of the batch, for any number of groups of devices.

    Attributes:
      lists: the largest number of lists in a batch. A loss ignores further lists.
      documents: the largest number of documents in a list. A loss ignores further documents.
      combine: "max" or "mean" of the scores of the windows of a document; "" without windows.
    """

    lists: int
    documents: int
    combine: str = dataclasses.field(default="", kw_only=True)

    @abc.abstractmethod
    def mean_loss(self, lists: Lists) -> jax.Array:
        """Returns the loss of a batch, a scalar; 0 without lists."""

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the loss of the batch for each pair, and whether the list of each pair is correct.

        See `Lists.are_correct` for correct lists.
        """
        weights = batch["weights"]
        scores, labels = logits.reshape(-1).astype(jnp.float32), batch["labels"].reshape(-1, 3)
        # Places without a pair have an index after all lists, so that `_lists` drops them.
        indices = jnp.where(weights.reshape(-1) > 0, labels[:, LIST], self.lists).astype(jnp.int32)
        lists = self._lists(*(jax.lax.all_gather(x, GROUPS, tiled=True) for x in (scores, labels, indices)))
        correct = lists.are_correct()[indices]
        return jnp.full(weights.shape, self.mean_loss(lists)), correct.reshape(weights.shape)

    def _lists(self, scores: jax.Array, labels: jax.Array, indices: jax.Array) -> Lists:
        """Returns the documents by list. The score of a document combines the scores of its windows."""
        places = (indices, labels[:, POSITION].astype(jnp.int32))
        empty = jnp.zeros((self.lists, self.documents))
        counts = empty.at[places].add(1, mode="drop")
        if self.combine == "max":
            highest = jnp.full(empty.shape, LOWEST).at[places].max(scores, mode="drop")
            list_scores = jnp.where(counts > 0, highest, 0)
        else:  # without windows, a document has one score
            list_scores = empty.at[places].add(scores, mode="drop") / jnp.maximum(counts, 1)
        return Lists(list_scores, empty.at[places].set(labels[:, GRADE], mode="drop"), counts > 0)


@dataclasses.dataclass(frozen=True)
class MultipleNegatives(ListLoss):
    """The cross-entropy of the first document among the documents of the list (InfoNCE).

    Attributes:
      scale: multiplies the probabilities, which are the sigmoid of the scores.
    """

    scale: float = 10.0

    def mean_loss(self, lists: Lists) -> jax.Array:
        """Returns the mean over the lists."""
        return lists.mean(-lists.log_probs(self.scale * jax.nn.sigmoid(lists.scores))[:, 0])


@dataclasses.dataclass(frozen=True)
class MarginMSE(ListLoss):
    """The squared error of score differences (Hofstätter et al. 2020). The grades are the scores of a teacher.

    A difference is the score of the first document minus the score of another document of the list.
    """

    def mean_loss(self, lists: Lists) -> jax.Array:
        """Returns the mean over all differences of the batch."""
        errors = lists.scores - lists.grades
        is_compared = lists.is_there[:, 1:]
        squares = jnp.where(is_compared, jnp.square(errors[:, :1] - errors[:, 1:]), 0)
        return squares.sum() / jnp.maximum(is_compared.sum(), 1)


@dataclasses.dataclass(frozen=True)
class ListNet(ListLoss):
    """The cross-entropy of the distributions that are the softmax of grades and of scores (Cao et al. 2007)."""

    def mean_loss(self, lists: Lists) -> jax.Array:
        """Returns the mean over the lists."""
        return lists.mean(-lists.sum(jnp.exp(lists.log_probs(lists.grades)) * lists.log_probs(lists.scores)))


@dataclasses.dataclass(frozen=True)
class KLDivergence(ListLoss):
    """The KL divergence from a teacher's distribution, multiplied by the squared temperature.

    The grades are the scores of the teacher. A distribution is the softmax of scores.

    Attributes:
      temperature: divides the scores of the model and of the teacher.
    """

    temperature: float = 1.0

    def mean_loss(self, lists: Lists) -> jax.Array:
        """Returns the mean over the lists."""
        student, teacher = (lists.log_probs(x / self.temperature) for x in (lists.scores, lists.grades))
        return self.temperature**2 * lists.mean(lists.sum(jnp.exp(teacher) * (teacher - student)))


@dataclasses.dataclass(frozen=True)
class ListMLE(ListLoss):
    """The negative log-likelihood of the best order of a list, in the Plackett-Luce model (Xia et al. 2008).

    Attributes:
      respect_input_order: whether the best order is the order of the positions. False: it is the descending order of
        the grades, and documents with equal grades keep their order.
    """

    respect_input_order: bool = False

    def mean_loss(self, lists: Lists) -> jax.Array:
        """Returns the mean over the lists."""
        ordered = lists.sort(jnp.zeros_like(lists.grades) if self.respect_input_order else lists.grades)
        scores = jnp.where(ordered.is_there, ordered.scores, LOWEST)
        log_likelihoods = scores - jax.lax.cumlogsumexp(scores, axis=1, reverse=True)
        return lists.mean(-ordered.sum(self.weights(ordered.is_there) * log_likelihoods))

    def weights(self, is_there: jax.Array) -> jax.Array:
        """Returns the weights of the places of sorted lists `[lists, documents]`."""
        return jnp.ones(is_there.shape)


@dataclasses.dataclass(frozen=True)
class PositionAwareListMLE(ListMLE):
    """`ListMLE` with normalized weights 2**(documents - rank) - 1 of the places (Lan et al. 2014)."""

    def weights(self, is_there: jax.Array) -> jax.Array:
        """Returns the weights, whose sum is 1; all are 0 in a list of one document."""
        # These are the weights divided by 2**documents, which would overflow for long lists.
        weights = jnp.exp2(-jnp.arange(1.0, 1 + is_there.shape[1])) - jnp.exp2(-is_there.sum(1, keepdims=True))
        weights = jnp.where(is_there, weights, 0)
        sums = weights.sum(1, keepdims=True)
        return weights / jnp.where(sums > 0, sums, 1)


@dataclasses.dataclass(frozen=True)
class RankNet(ListLoss):
    """The binary cross-entropy, in bits, of the order of two documents with different grades (Burges et al. 2005).

    Attributes:
      k: compares pairs of documents of which one is in the first k ranks by score; 0 for all pairs.
      sigma: multiplies the difference of two scores.
    """

    k: int = 0
    sigma: float = 1.0

    def mean_loss(self, lists: Lists) -> jax.Array:
        """Returns the mean over all compared pairs of the batch."""
        ranked, k = lists.sort(lists.scores), self.k or lists.scores.shape[1]
        in_first = jnp.arange(ranked.scores.shape[1]) < k
        is_compared = self.is_compared(_differences(ranked.grades)) & (in_first[:, None] | in_first)
        is_compared &= ranked.is_there[:, :, None] & ranked.is_there[:, None, :]
        losses = -jax.nn.log_sigmoid(self.sigma * _differences(ranked.scores)) / math.log(2)
        losses = jnp.where(is_compared, self.weights(ranked, k) * losses, 0)
        return losses.sum() / jnp.maximum(is_compared.sum(), 1)

    def is_compared(self, differences: jax.Array) -> jax.Array:
        """Returns which differences of grades, the first document minus the second, belong to compared pairs."""
        return differences > 0

    def weights(self, ranked: Lists, k: int) -> jax.Array:
        """Returns the weights of pairs of documents, an array that broadcasts to `[lists, documents, documents]`.

        Args:
          ranked: the lists, sorted by descending scores.
          k: the number of first ranks that count.
        """
        del ranked, k
        return jnp.ones(())


SCHEMES = ("none", "ndcg_loss1", "ndcg_loss2", "lambda_rank", "ndcg_loss2++")


@dataclasses.dataclass(frozen=True)
class LambdaLoss(RankNet):
    """`RankNet` with weights that bound nDCG (Wang et al. 2018, LambdaLoss). Negative grades have the gain 0.

    Attributes:
      scheme: the weights of pairs, one of `SCHEMES`. The weights of "ndcg_loss2++" are the weights of "ndcg_loss2",
        multiplied by `mu`, plus the weights of "lambda_rank".
      mu: see `scheme`.
    """

    scheme: str = "ndcg_loss2++"
    mu: float = 10.0

    def is_compared(self, differences: jax.Array) -> jax.Array:
        """Returns which pairs are compared: "ndcg_loss1" compares all documents."""
        return jnp.ones(differences.shape, bool) if self.scheme == "ndcg_loss1" else differences > 0

    def weights(self, ranked: Lists, k: int) -> jax.Array:
        """Returns the weights of the scheme."""
        ranks = jnp.arange(ranked.scores.shape[1])
        discounts, gains = 1 / jnp.log2(2.0 + ranks), _normalized_gains(ranked, k)
        if self.scheme == "none":
            return jnp.ones(())
        if self.scheme == "ndcg_loss1":
            return (gains * discounts)[:, :, None]
        by_distance = jnp.append(0.0, discounts[:-1] - discounts[1:])[jnp.abs(_differences(ranks))]
        by_rank = jnp.abs(_differences(discounts))
        factors = {
            "ndcg_loss2": by_distance,
            "lambda_rank": by_rank,
            "ndcg_loss2++": self.mu * by_distance + by_rank,
        }
        return factors[self.scheme] * jnp.abs(_differences(gains))


def _normalized_gains(ranked: Lists, k: int) -> jax.Array:
    """Returns the gains 2**grade - 1, divided by the best discounted sum of the gains of k documents.

    Returns:
      `[lists, documents]`; 0 in lists without a positive grade.
    """
    grades = jnp.where(ranked.is_there, jnp.maximum(ranked.grades, 0), 0)
    highest = grades.max(1, keepdims=True)
    gains = jnp.exp2(grades - highest) - jnp.exp2(-highest)  # divided by 2**highest, which could overflow
    best_gains = -jnp.sort(-gains, axis=1)[:, :k]
    best = (best_gains / jnp.log2(2.0 + jnp.arange(best_gains.shape[1]))).sum(1, keepdims=True)
    return gains / jnp.where(best > 0, best, 1)


def _differences(values: jax.Array) -> jax.Array:
    """Returns all differences of two values `[..., n]`: `[..., n, n]`, the first value minus the second."""
    return values[..., :, None] - values[..., None, :]


LOSSES: dict[str, type] = {
    "binary_cross_entropy": BinaryCrossEntropy,
    "mse": MSE,
    "multiple_negatives": MultipleNegatives,
    "margin_mse": MarginMSE,
    "list_net": ListNet,
    "list_mle": ListMLE,
    "position_aware_list_mle": PositionAwareListMLE,
    "rank_net": RankNet,
    "lambda": LambdaLoss,
    "kl": KLDivergence,
}
POINTWISE = ("binary_cross_entropy", "mse")  # the losses that depend on one pair


def make_loss(loss_config: ConfigDict, lists: int, documents: int, combine: str = "") -> LabelLoss:
    """Returns the loss of `config.loss`.

    Args:
      loss_config: `config.loss`. A loss uses the settings with the names of its attributes.
      lists: the largest number of lists in a batch.
      documents: the largest number of documents in a list.
      combine: see `ListLoss`.
    """
    loss_class = LOSSES[loss_config.name]
    values = {**loss_config, "lists": lists, "documents": documents, "combine": combine}
    names = [field.name for field in dataclasses.fields(loss_class)]
    loss: LabelLoss = loss_class(**{name: values[name] for name in names if name in values})
    return loss


def validate_loss(config: Any) -> None:
    """Raises `UserError` if a setting of `config.loss` is invalid."""
    limits.one_of(config, "loss.name", tuple(LOSSES))
    limits.one_of(config, "loss.scheme", SCHEMES)
    for name in ("positive_weight", "scale", "sigma", "temperature"):
        value = config.loss[name]
        limits.require(0 < value < math.inf, f"loss.{name}", value, "must be above 0 and finite; set for example 1.0")
    k, mu = config.loss.k, config.loss.mu
    limits.require(k >= 0, "loss.k", k, "must be 0 or more; set 0 to compare all documents of a list")
    limits.require(0 <= mu < math.inf, "loss.mu", mu, "must be 0 or more and finite; set for example 10.0")
