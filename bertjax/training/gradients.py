"""The gradients of a batch: of all rows together, or in microbatches, also if rows depend on each other."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.data.batch import join_microbatches, split_microbatches
from bertjax.training.state import Frozen, merge_trainable, trainable_params
from bertjax.training.task import CoupledLoss, Loss

Gradients = tuple[dict, dict]  # gradients of the trainable params, and the metrics with the `loss`


@dataclasses.dataclass(frozen=True)
class GradientFunction:
    """Computes gradients and metrics, sums over the rows, and the carry of the rows, or None.

    Attributes:
      loss: the loss.
      frozen: the params that are not trained.
      microbatches: the number of parts of a batch, of which one is computed at a time.
    """

    loss: Loss
    frozen: Frozen
    microbatches: int

    def __call__(self, params: dict, batch: dict, keys: jax.Array) -> tuple[Gradients, Any]:
        """Returns ((gradients, metrics), carry).

        Args:
          params: cast params, trainable and frozen.
          batch: a normalized batch `[rows, ...]`.
          keys: `[rows]` random keys of dropout.
        """
        if self.microbatches == 1:
            return self._full_batch_gradients(params, batch, keys)
        if isinstance(self.loss, CoupledLoss) and self.loss.couples_rows:
            return self._cached_gradients(self.loss, params, batch, keys)
        return self._accumulated_gradients(params, batch, keys)

    def _full_batch_gradients(self, params: dict, batch: dict, keys: jax.Array) -> tuple[Gradients, Any]:
        def loss_of(trainable: dict) -> tuple[jax.Array, dict]:
            return self.loss(merge_trainable(params, trainable, self.frozen), batch, keys)

        trainable = trainable_params(params, self.frozen)
        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        carry = metrics.pop("carry", None)
        return (gradients, {"loss": loss, **metrics}), carry

    def _accumulated_gradients(self, params: dict, batch: dict, keys: jax.Array) -> tuple[Gradients, Any]:
        parts = split_microbatches((batch, keys), self.microbatches)
        return _accumulate_microbatches(lambda *part: self._full_batch_gradients(params, *part), parts)

    def _cached_gradients(
        self, coupled: CoupledLoss, params: dict, batch: dict, keys: jax.Array
    ) -> tuple[Gradients, Any]:
        """Returns the gradients of rows that depend on each other (GradCache; Gao et al. 2021).

        Computes the outputs of all rows, then the gradient of the loss with respect to the outputs, and then the
        gradient of each microbatch.
        """
        parts = split_microbatches((batch, keys), self.microbatches)
        outputs = jax.lax.map(lambda part: coupled.outputs(params, *part), parts)

        def loss_of(outputs: jax.Array) -> tuple[jax.Array, dict]:
            return coupled.loss_of_outputs(join_microbatches(outputs), batch)

        (loss, metrics), output_gradients = jax.value_and_grad(loss_of, has_aux=True)(outputs)

        def gradients_of(part: tuple, output_gradient: jax.Array) -> tuple[dict, None]:
            def outputs_of(trainable: dict) -> jax.Array:
                return coupled.outputs(merge_trainable(params, trainable, self.frozen), *part)

            _, pull_back = jax.vjp(outputs_of, trainable_params(params, self.frozen))
            return pull_back(output_gradient)[0], None

        gradients, _ = _accumulate_microbatches(gradients_of, (parts, output_gradients))
        return (gradients, {"loss": loss, **metrics}), None


def _accumulate_microbatches(compute: Callable, parts: Any) -> tuple[Any, Any]:
    """Computes microbatches one after the other.

    Args:
      compute: a microbatch -> (values to sum, arrays `[rows, ...]` or None).
      parts: the arrays of all microbatches, `[microbatches, rows, ...]`.

    Returns:
      The sums in float32, and the joined arrays of all rows.
    """

    def add(total: Any, part: Any) -> tuple[Any, Any]:
        values, rows = compute(*part)
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, values), rows

    shapes, _ = jax.eval_shape(compute, *jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    total, rows = jax.lax.scan(add, zeros, parts)
    return total, join_microbatches(rows)
