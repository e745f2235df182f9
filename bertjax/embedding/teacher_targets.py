"""The targets of a teacher for the training of embeddings: its embeddings, or scores of the texts of an example."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
import optax

from bertjax.embedding.losses import cosines_with_first
from bertjax.models.heads import l2_normalize

Scores = TypeVar("Scores", jax.Array, np.ndarray)


def example_scores(embeddings: jax.Array) -> jax.Array:
    """Returns the scores of examples with embeddings `[..., texts, width]`.

    Returns:
      The cosine of query and positive minus the cosine of query and each negative, `[..., negatives]`; without
      negatives, the cosine of query and positive, `[..., 1]`.
    """
    cosines = document_scores(embeddings)
    return cosines if cosines.shape[-1] == 1 else margins(cosines)


def margins(scores: Scores) -> Scores:
    """Returns the score of the positive minus the score of each negative, from scores `[..., documents]`."""
    return scores[..., :1] - scores[..., 1:]


def document_scores(embeddings: jax.Array) -> jax.Array:
    """Returns the cosine of the query and each document `[..., texts - 1]`, from embeddings `[..., texts, width]`."""
    return cosines_with_first(l2_normalize(embeddings))


VECTORS, SCORES, LISTS = "vectors", "scores", "kl"  # values of `config.distill.what`
# The targets of examples from the embeddings of their texts `[examples, texts, width]`, by `config.distill.what`.
TARGETS: Mapping[str, Callable[[Any], Any]] = {
    VECTORS: lambda embeddings: embeddings,
    SCORES: example_scores,
    LISTS: document_scores,
}


@dataclasses.dataclass(frozen=True)
class ListDivergence:
    """The KL divergence of two distributions over the documents of a query (DistillKLDivLoss).

    A distribution is the softmax of scores, divided by a temperature. The divergence is multiplied by the squared
    ratio of the student's temperature and `loss_temperature` (Hinton et al. 2015, section 2). If both temperatures are
    equal, the gradient has the size of the gradient of InfoNCE.

    Attributes:
      student_temperature: divides the scores of the student; 0: the temperature of the call.
      teacher_temperature: divides the scores of the teacher; 0: the temperature of the call.
      loss_temperature: the temperature of InfoNCE. With 1.0, the divergence equals DistillKLDivLoss.
    """

    student_temperature: float = 0.0
    teacher_temperature: float = 0.0
    loss_temperature: float = 1.0

    def __call__(self, scores: jax.Array, teacher_scores: jax.Array, temperature: float) -> jax.Array:
        """Returns the divergence of each example `[...]`; both scores are `[..., documents]`."""
        student, teacher = (x or temperature for x in (self.student_temperature, self.teacher_temperature))
        log_probs = jax.nn.log_softmax(scores / student)
        return (student / self.loss_temperature) ** 2 * optax.kl_divergence(
            log_probs, jax.nn.softmax(teacher_scores / teacher)
        )
