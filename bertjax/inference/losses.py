"""The losses of labels, with the settings of `config.head` that are theirs: weights of the classes, label smoothing.

A loss is a function (logits, batch) -> (losses, whether each prediction is correct), both of the shape of the batch's
weights. The loss of a batch is the sum of these divided by what `counted` sums to. One that a teacher can be learnt
with has a `divergence`: (logits, the teacher's, temperature that divides both) -> how far they are from each other.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bertjax.common.errors import UserError
from bertjax.config.lists import weights_of
from bertjax.data.loading.examples import Examples

SETTINGS = ("class_weights", "label_smoothing")  # the fields of `config.head` that are not the model's
BALANCED = "balanced"


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy of class indices, as torch's `CrossEntropyLoss(weight, label_smoothing)`.

    Args:
      weights: of each class; empty: all 1. The mean over a batch is divided by the sum of its examples' weights.
    """

    weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0

    def __call__(self, logits, batch: dict) -> tuple[jax.Array, jax.Array]:
        labels, smoothing = batch["labels"], self.label_smoothing
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        if self.weights:
            losses *= jnp.asarray(self.weights)[labels]
        if smoothing:
            of_all = -jax.nn.log_softmax(logits) * jnp.asarray(self.weights or (1.0,))
            losses = (1 - smoothing) * losses + smoothing * of_all.mean(-1)
        return losses, logits.argmax(-1) == labels

    @staticmethod
    def divergence(logits, theirs, temperature: float) -> jax.Array:
        ours = jax.nn.log_softmax(logits / temperature)
        return temperature**2 * optax.kl_divergence(ours, jax.nn.softmax(theirs / temperature))

    def counted(self, batch: dict) -> jax.Array:
        """Returns what each prediction counts in the mean."""
        return batch["weights"] * jnp.asarray(self.weights)[batch["labels"]] if self.weights else batch["weights"]

    @staticmethod
    def balanced(examples: Examples, labels: int) -> np.ndarray:
        """Returns scikit-learn's balanced weights: examples / (classes * those of the class); 1 for a class of none."""
        found = np.concatenate([np.ravel(each) for each in examples.labels]) if examples.per_token else examples.labels
        counts = np.bincount(np.asarray(found)[np.asarray(found) >= 0], minlength=labels)
        return np.where(counts, counts.sum() / ((counts > 0).sum() * np.maximum(counts, 1)), 1.0)


@dataclasses.dataclass(frozen=True)
class SigmoidCrossEntropy:
    """The mean cross-entropy of labels that are there or not, 1 or 0, as torch's `BCEWithLogitsLoss(pos_weight)`.

    Args:
      weights: of each label where it is there; empty: all 1.
    """

    weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0

    def __post_init__(self):
        if self.label_smoothing:
            raise UserError(
                f"config.head.label_smoothing = {self.label_smoothing}: is for classes, of which a text has one; leave "
                f"it out where a text has several labels"
            )

    def __call__(self, logits, batch: dict) -> tuple[jax.Array, jax.Array]:
        labels = batch["labels"].astype(jnp.float32)
        losses = optax.sigmoid_binary_cross_entropy(logits, labels)
        if self.weights:
            losses *= 1 + labels * (jnp.asarray(self.weights) - 1)
        return losses.mean(-1), ((logits > 0) == labels).all(-1)

    @staticmethod
    def divergence(logits, theirs, temperature: float) -> jax.Array:
        shares = jax.nn.sigmoid(theirs / temperature)
        entropy = optax.sigmoid_binary_cross_entropy(theirs / temperature, shares)
        ours = optax.sigmoid_binary_cross_entropy(logits / temperature, shares)
        return temperature**2 * (ours - entropy).mean(-1)

    def counted(self, batch: dict) -> jax.Array:
        """Returns what each prediction counts in the mean."""
        return batch["weights"]

    @staticmethod
    def balanced(examples: Examples, labels: int) -> np.ndarray:
        """Returns for each label the texts without it for each text with it; 1 if all or none have it."""
        del labels
        there = np.sum(examples.labels, axis=0)
        absent = len(examples) - there
        return np.where((there > 0) & (absent > 0), absent / np.maximum(there, 1), 1.0)


class SquaredError:
    """The squared error of numbers, as in transformers; errors below 0.5 are correct."""

    def __call__(self, logits, batch: dict) -> tuple[jax.Array, jax.Array]:
        error = logits[..., 0] - batch["labels"]
        return jnp.square(error), jnp.abs(error) < 0.5

    @staticmethod
    def divergence(logits, theirs, temperature: float) -> jax.Array:
        del temperature  # numbers are what they are
        return jnp.square(logits - theirs)[..., 0]


@dataclasses.dataclass(frozen=True)
class Distilled:
    """The loss of labels, and the divergence from what a teacher says of the example (Hinton et al. 2015, section 2).

    Args:
      loss: the loss of the labels, with the divergence.
      temperature: divides the logits of both; the divergence is multiplied by its square, so that gradients keep their
        size. Of no effect on numbers.
      weight: of the teacher; the labels have the rest.
    """

    loss: Callable
    temperature: float
    weight: float

    def __call__(self, logits, batch: dict) -> tuple[jax.Array, jax.Array]:
        losses, correct = self.loss(logits, batch)
        divergence = self.loss.divergence(logits, batch["teacher_logits"], self.temperature)
        return (1 - self.weight) * losses + self.weight * divergence, correct


def with_settings(loss: Callable, head: Mapping, labels: Sequence[str], train: Examples) -> Callable:
    """Returns a loss with the settings of `config.head`. Raises `UserError` if they are invalid, or if it has none."""
    text, smoothing = (head.get(name, default) for name, default in zip(SETTINGS, ("", 0.0)))
    if not text and not smoothing:
        return loss
    if not isinstance(loss, (CrossEntropy, SigmoidCrossEntropy)):
        name, value = (SETTINGS[0], text) if text else (SETTINGS[1], smoothing)
        raise UserError(f"config.head.{name} = {value!r}: this task predicts no classes; leave it out")
    weights = ()
    if text == BALANCED:
        weights = loss.balanced(train, len(labels))
    elif text:
        by_label, _ = weights_of("head.class_weights", text, labels, "label", "the training data")
        weights = by_label.values()
    return dataclasses.replace(loss, weights=tuple(map(float, weights)), label_smoothing=smoothing)


def counted(loss: Callable, batch: dict) -> jax.Array:
    """Returns what each prediction of a batch counts in the mean of a loss."""
    return loss.counted(batch) if isinstance(loss, (CrossEntropy, SigmoidCrossEntropy)) else batch["weights"]
