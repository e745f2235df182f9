"""The gradients of a batch: in one pass, accumulated over microbatches, or with gradient caching for coupled losses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.data.batch import join_microbatches, split_microbatches
from bertjax.training.state import Frozen, merge_trainable, trainable_params
from bertjax.training.task import CoupledLoss, Loss

Gradients = tuple[dict, dict]  # (gradients of the trainable params, {metric: scalar}, including `loss`)


@dataclasses.dataclass(frozen=True)
class GradientFunction:
    """Computes gradients and metrics, which are sums over the rows, and the carry for the next step.

    Attributes:
      loss: the loss.
      frozen: the frozen params.
      microbatches: the number of microbatches, which are computed one after the other.
    """

    loss: Loss
    frozen: Frozen
    microbatches: int

    def __call__(self, params: dict, batch: dict, keys: jax.Array) -> tuple[Gradients, Any]:
        """Returns ((gradients, metrics), carry); the carry is None if the batch has none.

        Args:
          params: cast params, trainable and frozen.
          batch: a normalized batch `[rows, ...]`.
          keys: `[rows]` random keys for dropout.
        """
        if self.microbatches == 1:
            return self._full_batch_gradients(params, batch, keys)
        if isinstance(self.loss, CoupledLoss) and self.loss.couples_rows:
            return self._cached_gradients(self.loss, params, batch, keys)
        parts = split_microbatches((batch, keys), self.microbatches)
        return _accumulate_microbatches(lambda *part: self._full_batch_gradients(params, *part), parts)

    def _full_batch_gradients(self, params: dict, batch: dict, keys: jax.Array) -> tuple[Gradients, Any]:
        def loss_of(trainable: dict) -> tuple[jax.Array, dict]:
            return self.loss(merge_trainable(params, trainable, self.frozen), batch, keys)

        trainable = trainable_params(params, self.frozen)
        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        carry = metrics.pop("carry", None)
        return (gradients, {"loss": loss, **metrics}), carry

    def _cached_gradients(
        self, coupled: CoupledLoss, params: dict, batch: dict, keys: jax.Array
    ) -> tuple[Gradients, Any]:
        """Returns the gradients of a coupled loss with gradient caching (GradCache; Gao et al. 2021).

        Computes the outputs of all microbatches without gradients, then the gradient of the loss with respect to the
        outputs, and then the vector-Jacobian product of each microbatch.
        """
        parts = split_microbatches((batch, keys), self.microbatches)
        outputs = jax.lax.map(lambda part: coupled.outputs(params, *part), parts)

        def loss_of(outputs: jax.Array) -> tuple[jax.Array, dict]:
            return coupled.loss_of_outputs(join_microbatches(outputs), batch)

        (loss, metrics), output_gradients = jax.value_and_grad(loss_of, has_aux=True)(outputs)

        def gradients_of(part: tuple, output_gradient: jax.Array) -> tuple[dict, None]:
            def outputs_of(trainable: dict) -> jax.Array:
                return coupled.outputs(merge_trainable(params, trainable, self.frozen), *part)

            _, vjp = jax.vjp(outputs_of, trainable_params(params, self.frozen))
            return vjp(output_gradient)[0], None

        gradients, _ = _accumulate_microbatches(gradients_of, (parts, output_gradients))
        return (gradients, {"loss": loss, **metrics}), None


def _accumulate_microbatches(compute: Callable, parts: Any) -> tuple[Any, Any]:
    """Computes microbatches one after the other, and sums the results.

    Args:
      compute: a microbatch -> (values to sum, arrays `[rows, ...]` or None).
      parts: the arrays of all microbatches, `[microbatches, rows, ...]`.

    Returns:
      The sums in float32, and the concatenated arrays `[microbatches * rows, ...]` or None.
    """

    def add(total: Any, part: Any) -> tuple[Any, Any]:
        values, rows = compute(*part)
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, values), rows

    shapes, _ = jax.eval_shape(compute, *jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    total, rows = jax.lax.scan(add, zeros, parts)
    return total, join_microbatches(rows)
