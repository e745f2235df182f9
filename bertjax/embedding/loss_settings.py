"""The loss of embeddings that a config sets: a loss for each form of examples, and the divergence from a teacher."""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from bertjax.common.errors import UserError
from bertjax.config.lists import split_at_commas
from bertjax.embedding.losses import (
    AngleRanking,
    Contrastive,
    GuidedNegatives,
    InBatchNegatives,
    OnlineContrastive,
    Ranking,
    Triplet,
)
from bertjax.embedding.teacher_targets import LISTS, ListDivergence, document_scores, example_scores
from bertjax.inference.losses import CouplesRows, LabelLoss
from bertjax.models.heads import l2_normalize

# The names of the losses by the type of the values of a form, see `Form.value_type`. The first name is the default.
NAMES: Mapping[type | None, tuple[str, ...]] = {
    None: ("infonce", "triplet"),
    np.float32: ("cosent", "angle"),
    np.int32: ("contrastive", "online_contrastive"),
}


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The fields of `config.loss`. Configs of older versions lack the fields with defaults.

    Attributes:
      temperature: divides the similarities of InfoNCE, CoSENT and AnglE.
      symmetric: see `InBatchNegatives`.
      margin: see `Contrastive`.
      widths: the widths of `Matryoshka`, such as "256,64".
      name: the names of losses, separated by commas; "" for the default loss of each form.
      distance_metric: see `Triplet`.
      triplet_margin: see `Triplet`.
      guide: the checkpoint of the guide of `GuidedNegatives`; "" for `InBatchNegatives`.
      guide_margin: see `GuidedNegatives`.
    """

    temperature: float
    symmetric: bool
    margin: float
    widths: str
    name: str = ""
    distance_metric: str = "cosine"
    triplet_margin: float = 0.5
    guide: str = ""
    guide_margin: float = 0.0

    @property
    def names(self) -> dict[type | None, str]:
        """The name of the loss for each type of values. Raises `UserError` for unknown and for conflicting names."""
        chosen = list(filter(None, map(str.strip, split_at_commas(self.name))))
        known = [name for names in NAMES.values() for name in names]
        field = f"config.loss.name = {self.name!r}: "
        if unknown := [name for name in chosen if name not in known]:
            raise UserError(f"{field}unknown loss {unknown[0]!r}; choose from {', '.join(known)}")
        for names in NAMES.values():
            if len(same := [name for name in chosen if name in names]) > 1:
                raise UserError(f"{field}{' and '.join(same)} train on the same form of examples; name one of them")
        return {kind: next((name for name in chosen if name in names), names[0]) for kind, names in NAMES.items()}


@dataclasses.dataclass(frozen=True)
class ByForm(CouplesRows):
    """Chooses the loss of a batch by the form of its examples. The labels determine the form.

    Attributes:
      of_texts: the loss for labels that are numbers of texts, one for each text of an example.
      of_score: the loss for labels that are floating-point scores.
      of_label: the loss for integer labels.
      of_list: the divergence from a teacher's scores of the documents of a query; None: the squared error of scores.
    """

    of_texts: LabelLoss
    of_score: LabelLoss
    of_label: LabelLoss
    of_list: ListDivergence | None = None

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the result of the loss for the form of the examples; `logits` are embeddings."""
        labels = batch["labels"]
        if labels.ndim > batch["weights"].ndim:
            return self.of_texts(logits, batch)
        return (self.of_score if jnp.issubdtype(labels.dtype, jnp.floating) else self.of_label)(logits, batch)

    def divergence(self, logits: jax.Array, teacher_logits: jax.Array, temperature: float) -> jax.Array:
        """Returns the distance of the embeddings of each example from the targets of a teacher.

        Args:
          logits: the embeddings, `[..., texts, width]`.
          teacher_logits: the embeddings of the teacher, `[..., texts, width]`, for the mean of 1 - cosine, which is
            half the squared distance of normalized embeddings; or the scores of the teacher, for `of_list`
            `[..., texts - 1]`, else as `example_scores` for the mean squared error, MarginMSE (Hofstätter et al. 2020).
          temperature: has an effect only on `of_list`.
        """
        if teacher_logits.ndim == logits.ndim:
            return 1 - (l2_normalize(logits) * l2_normalize(teacher_logits)).sum(-1).mean(-1)
        if self.of_list:
            return self.of_list(document_scores(logits), teacher_logits, temperature)
        return jnp.square(example_scores(logits) - teacher_logits).mean(-1)


@dataclasses.dataclass(frozen=True)
class Matryoshka(CouplesRows):
    """The sum of a loss over embeddings and their first dimensions, for several widths (Kusupati et al. 2022).

    The embeddings of each width are normalized, as in sentence-transformers. The whole embeddings determine whether an
    example is correct.
    """

    loss: ByForm
    widths: tuple[int, ...]

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the sum of the losses, and whether each example is correct; `logits` are embeddings."""
        results = [self.loss(l2_normalize(logits[..., :width]), batch) for width in self._all_widths(logits)]
        return functools.reduce(operator.add, (losses for losses, _ in results)), results[0][1]

    def divergence(self, logits: jax.Array, teacher_logits: jax.Array, temperature: float) -> jax.Array:
        """Returns the sum of the divergences; embeddings of a teacher are shortened, too."""
        has_embeddings = teacher_logits.ndim == logits.ndim
        divergences = (
            self.loss.divergence(
                logits[..., :width], teacher_logits[..., :width] if has_embeddings else teacher_logits, temperature
            )
            for width in self._all_widths(logits)
        )
        return functools.reduce(operator.add, divergences)

    def _all_widths(self, embeddings: jax.Array) -> list[int]:
        return sorted({embeddings.shape[-1], *self.widths}, reverse=True)


def make_loss(settings: ConfigDict, widths: Sequence[int], distill: ConfigDict | None = None) -> ByForm | Matryoshka:
    """Returns the loss of a config.

    Args:
      settings: `config.loss`.
      widths: the widths of `Matryoshka`.
      distill: `config.distill`; None: no distillation of lists.

    Raises:
      UserError: if `config.loss.name` is invalid.
    """
    fields = LossSettings(**settings)
    in_batch = InBatchNegatives(fields.temperature, fields.symmetric)
    if fields.guide:
        in_batch = GuidedNegatives(fields.temperature, False, fields.guide_margin)
    losses: dict[str, LabelLoss] = {
        "infonce": in_batch,
        "triplet": Triplet(fields.distance_metric, fields.triplet_margin),
        "cosent": Ranking(fields.temperature),
        "angle": AngleRanking(fields.temperature),
        "contrastive": Contrastive(fields.margin),
        "online_contrastive": OnlineContrastive(fields.margin),
    }
    names = fields.names
    of_list = None
    if distill is not None and distill.get("what") == LISTS:
        student, teacher = (distill.get(f"{role}_temperature", 0.0) for role in ("student", "teacher"))
        of_list = ListDivergence(student, teacher, fields.temperature)
    of_texts, of_score, of_label = (losses[names[value_type]] for value_type in (None, np.float32, np.int32))
    loss = ByForm(of_texts, of_score, of_label, of_list)
    return Matryoshka(loss, tuple(widths)) if widths else loss
