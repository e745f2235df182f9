"""The losses of labels, with the settings of `config.head`: class weights and label smoothing.

A loss is called as (logits, batch) -> (losses, whether each prediction is correct). Both results have the shape of the
weights of the batch. The loss of a batch is the sum of the losses, divided by the sum of `prediction_weights`. A
`DistillableLoss` also has a method `divergence`.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bertjax.common.errors import UserError
from bertjax.config.lists import parse_weights
from bertjax.data.loading.examples import Examples

SETTINGS = ("class_weights", "label_smoothing")  # fields of `config.head` that belong to the loss, not to the model
BALANCED = "balanced"


class LabelLoss(Protocol):
    """A loss of labels."""

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses of the labels, and whether each prediction is correct.

        Args:
          logits: the float32 outputs of the head for a batch.
          batch: the arrays of `Examples.batch`, such as `labels`. A packed batch has an axis for the texts of a row:
            `labels` is `[rows, texts, ...]`.
        """


class CouplesRows(abc.ABC):  # noqa: B024 (the ability has no methods)
    """The ability of a loss in which the loss of an example depends on other examples of the batch.

    Such a loss runs on the rows of a group of devices, and gathers the other rows with
    `jax.lax.all_gather(..., mesh.GROUPS)`.
    """


@runtime_checkable
class DistillableLoss(LabelLoss, Protocol):
    """A loss that also compares the logits of a student and a teacher."""

    def divergence(self, logits: jax.Array, teacher_logits: jax.Array, temperature: float) -> jax.Array:
        """Returns the divergence of the logits from the teacher's logits, both divided by the temperature."""


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy of class indices, as torch's `CrossEntropyLoss(weight, label_smoothing)`.

    Attributes:
      weights: the weight of each class; empty if all weights are 1. The loss of a batch is divided by the sum of the
        weights of the classes of its examples.
      label_smoothing: the share of the target distribution that is uniform.
    """

    weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether each prediction is correct."""
        labels, smoothing = batch["labels"], self.label_smoothing
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        if self.weights:
            losses *= jnp.asarray(self.weights)[labels]
        if smoothing:
            class_losses = -jax.nn.log_softmax(logits) * jnp.asarray(self.weights or (1.0,))
            losses = (1 - smoothing) * losses + smoothing * class_losses.mean(-1)
        return losses, logits.argmax(-1) == labels

    @staticmethod
    def divergence(logits: jax.Array, teacher_logits: jax.Array, temperature: float) -> jax.Array:
        """Returns the KL divergence from the teacher's distribution, multiplied by the squared temperature."""
        log_probs = jax.nn.log_softmax(logits / temperature)
        return temperature**2 * optax.kl_divergence(log_probs, jax.nn.softmax(teacher_logits / temperature))

    def prediction_weights(self, batch: dict) -> jax.Array:
        """Returns the weight of each prediction in the mean."""
        return batch["weights"] * jnp.asarray(self.weights)[batch["labels"]] if self.weights else batch["weights"]

    @staticmethod
    def balanced(examples: Examples, labels: int) -> np.ndarray:
        """Returns the balanced weights of scikit-learn: examples / (classes * examples of the class).

        A class without examples has the weight 1, and is not counted among the classes.

        Args:
          examples: the training examples.
          labels: the number of labels.
        """
        values = np.asarray(_labels_of(examples))
        counts = np.bincount(values[values >= 0], minlength=labels)
        return np.where(counts, counts.sum() / ((counts > 0).sum() * np.maximum(counts, 1)), 1.0)


@dataclasses.dataclass(frozen=True)
class SigmoidCrossEntropy:
    """The mean cross-entropy of several labels per text, as torch's `BCEWithLogitsLoss(pos_weight)`.

    Attributes:
      weights: the weight of each label in texts that have the label; empty if all weights are 1.
      label_smoothing: must be 0.

    Raises:
      UserError: if `label_smoothing` is not 0.
    """

    weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        """Checks the fields."""
        if self.label_smoothing:
            raise UserError(
                f"config.head.label_smoothing = {self.label_smoothing}: must be 0 if a text can have several labels; "
                f"set 0"
            )

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether all labels of each prediction are correct."""
        labels = batch["labels"].astype(jnp.float32)
        losses = optax.sigmoid_binary_cross_entropy(logits, labels)
        if self.weights:
            losses *= 1 + labels * (jnp.asarray(self.weights) - 1)
        return losses.mean(-1), ((logits > 0) == labels).all(-1)

    @staticmethod
    def divergence(logits: jax.Array, teacher_logits: jax.Array, temperature: float) -> jax.Array:
        """Returns the mean KL divergence from the teacher's probabilities, multiplied by the squared temperature."""
        probs = jax.nn.sigmoid(teacher_logits / temperature)
        entropy = optax.sigmoid_binary_cross_entropy(teacher_logits / temperature, probs)
        cross_entropy = optax.sigmoid_binary_cross_entropy(logits / temperature, probs)
        return temperature**2 * (cross_entropy - entropy).mean(-1)

    def prediction_weights(self, batch: dict) -> jax.Array:
        """Returns the weight of each prediction in the mean."""
        return batch["weights"]

    @staticmethod
    def balanced(examples: Examples, labels: int) -> np.ndarray:
        """Returns for each label the ratio of texts without the label to texts with the label.

        The weight is 1 if all texts or no texts have the label.

        Args:
          examples: the training examples.
          labels: the number of labels.
        """
        del labels
        present = np.sum(_labels_of(examples), axis=0)
        absent = len(examples) - present
        return np.where((present > 0) & (absent > 0), absent / np.maximum(present, 1), 1.0)


class SquaredError:
    """The squared error of numbers, as in transformers. Errors below 0.5 are correct."""

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether each prediction is correct."""
        error = logits[..., 0] - batch["labels"]
        return jnp.square(error), jnp.abs(error) < 0.5

    @staticmethod
    def divergence(logits: jax.Array, teacher_logits: jax.Array, temperature: float) -> jax.Array:
        """Returns the squared difference of the numbers. The temperature has no effect."""
        del temperature
        return jnp.square(logits - teacher_logits)[..., 0]


@dataclasses.dataclass(frozen=True)
class Distilled:
    """The loss of labels, and the divergence from a teacher's logits (Hinton et al. 2015, section 2).

    Attributes:
      loss: the loss of the labels.
      temperature: divides the logits of the student and of the teacher. The divergence is multiplied by the squared
        temperature, so that gradients keep their size. The temperature has no effect on the loss `SquaredError`.
      weight: the weight of the divergence. The weight of the labels is `1 - weight`.
    """

    loss: DistillableLoss
    temperature: float
    weight: float

    def __call__(self, logits: jax.Array, batch: dict) -> tuple[jax.Array, jax.Array]:
        """Returns the losses, and whether each prediction is correct."""
        losses, correct = self.loss(logits, batch)
        divergence = self.loss.divergence(logits, batch["teacher_logits"], self.temperature)
        return (1 - self.weight) * losses + self.weight * divergence, correct


def with_settings(loss: LabelLoss, head: Mapping, labels: Sequence[str], train: Examples) -> LabelLoss:
    """Returns a loss with the settings of `config.head`.

    Args:
      loss: the loss of the task.
      head: `config.head`.
      labels: the labels of the training data.
      train: the training examples.

    Raises:
      UserError: if a setting is invalid, or if the loss has no such setting.
    """
    class_weights, smoothing = (head.get(name, default) for name, default in zip(SETTINGS, ("", 0.0)))
    if not class_weights and not smoothing:
        return loss
    if not isinstance(loss, (CrossEntropy, SigmoidCrossEntropy)):
        name, value = (SETTINGS[0], class_weights) if class_weights else (SETTINGS[1], smoothing)
        raise UserError(f"config.head.{name} = {value!r}: this task predicts no classes; leave the field out")
    weights: Sequence[float] = ()
    if class_weights == BALANCED:
        weights = loss.balanced(train, len(labels)).tolist()
    elif class_weights:
        by_label, _ = parse_weights("head.class_weights", class_weights, labels, "label", "the training data")
        weights = list(by_label.values())
    return dataclasses.replace(loss, weights=tuple(map(float, weights)), label_smoothing=smoothing)


def couples_rows(loss: LabelLoss) -> bool:
    """Returns whether the loss of an example depends on other examples of the batch."""
    return isinstance(loss, CouplesRows) or (isinstance(loss, Distilled) and couples_rows(loss.loss))


def prediction_weights(loss: LabelLoss, batch: dict) -> jax.Array:
    """Returns the weight of each prediction of a batch in the mean of a loss."""
    if isinstance(loss, (CrossEntropy, SigmoidCrossEntropy)):
        return loss.prediction_weights(batch)
    return batch["weights"]


def _labels_of(examples: Examples) -> np.ndarray:
    """Returns all labels of the examples; labels per token as one array `[tokens]`."""
    if examples.labels is None:
        raise ValueError("the examples have no labels")
    if examples.per_token:
        return np.concatenate([np.ravel(labels) for labels in examples.labels])
    return np.asarray(examples.labels)
