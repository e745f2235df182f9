"""The objectives of fine-tuning: model, loss, and prediction of logits."""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from bertjax.data.examples import Examples, evaluation_batches
from bertjax.model.bert import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    forward_flops,
)
from bertjax.model.dropout import fold_in
from bertjax.sharding.mesh import local_rows, replicated
from bertjax.sharding.rules import RULES
from bertjax.sharding.streams import fetched, on_devices

PREDICTION_BATCH = 32


@dataclasses.dataclass(frozen=True)
class Objective:
    """The model and the loss of a kind of output layer.

    Args:
      architecture: the transformers class with the same output layer.
      make_model: (BertConfig, dtype=, remat=, **config.head) -> module.
      loss: (logits, batch) -> (losses, whether each prediction is correct), both of the shape of the batch's weights.
      frozen: top-level keys of the params that are not trained.
      flops: (module, sequences, length) -> model FLOPs of a training step.
    """

    architecture: str
    make_model: Callable[..., nn.Module]
    loss: Callable[[jax.Array, dict], tuple[jax.Array, jax.Array]]
    frozen: tuple[str, ...] = ()
    flops: Callable[[nn.Module, int, int], int] = lambda model, sequences, length: (
        3 * forward_flops(model.config, sequences, length, 0)
    )


def classification(labels: int) -> Objective:
    """Labels are `[batch]` class indices."""
    make_model = functools.partial(BertForSequenceClassification, labels=labels)
    return Objective("BertForSequenceClassification", make_model, _cross_entropy)


def regression() -> Objective:
    """Labels are `[batch]` numbers. The loss is the squared error, as in transformers; errors below 0.5 are correct."""

    def loss(logits, batch):
        error = logits[:, 0] - batch["labels"]
        return jnp.square(error), jnp.abs(error) < 0.5

    make_model = functools.partial(BertForSequenceClassification, labels=1)
    return Objective("BertForSequenceClassification", make_model, loss)


def tagging(labels: int) -> Objective:
    """Labels are `[batch, length]` class indices; those with weight 0 are ignored."""
    make_model = functools.partial(BertForTokenClassification, labels=labels)
    return Objective("BertForTokenClassification", make_model, _cross_entropy)


def spans() -> Objective:
    """Labels are `[batch, 2]`, first and last token. The loss is the mean of both (run_squad.model_fn_builder)."""

    def loss(logits, batch):
        logits = mask_padding(logits, batch["input_mask"])
        losses, correct = _cross_entropy(jnp.swapaxes(logits, 1, 2), batch)
        return losses.mean(-1), correct.all(-1)

    return Objective("BertForQuestionAnswering", BertForQuestionAnswering, loss)


def choice() -> Objective:
    """Labels are the `[batch]` indices of the correct sequence among several, each of which has one logit."""
    make_model = functools.partial(BertForSequenceClassification, labels=1)
    return Objective("BertForMultipleChoice", make_model, _cross_entropy)


def _cross_entropy(logits, batch):
    labels = batch["labels"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels), logits.argmax(-1) == labels


def mask_padding(logits: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Sets logits `[batch, length, 2]` to the minimum where `input_mask` `[batch, length]` is 0."""
    return jnp.where(input_mask[..., None] > 0, logits, jnp.finfo(jnp.float32).min)


def apply(model: nn.Module, params, batch: dict, dropout_keys: jax.Array | None = None) -> jax.Array:
    """Computes the logits of a batch; `[batch, choices]` if a row has several sequences."""
    inputs = [batch[name] for name in ("input_ids", "input_mask", "token_types")]
    rows, *choices, length = inputs[0].shape
    if choices:
        inputs = [x.reshape(-1, length) for x in inputs]
        if dropout_keys is not None:
            dropout_keys = jnp.stack([fold_in(dropout_keys, i) for i in range(choices[0])], axis=1).reshape(-1)
    logits = model.apply({"params": params}, *inputs, dropout_keys=dropout_keys)
    return logits.reshape(rows, *choices) if choices else logits


class Predictor:
    """Computes the logits of examples, in batches."""

    def __init__(self, model: nn.Module, mesh: Mesh, batch_size: int):
        self._mesh, self._batch_size, self._longest = mesh, batch_size, model.config.max_position_embeddings
        self._apply = jax.jit(functools.partial(apply, model), out_shardings=replicated(mesh))

    def __call__(self, params, examples: Examples, after_batch: Callable[[], None] = lambda: None) -> list[np.ndarray]:
        """Returns the logits of each example, on every host; logits per token without those of padding."""
        outputs: list = [None] * len(examples)
        own = local_rows(self._mesh, self._batch_size)
        examples = dataclasses.replace(examples, labels=None)
        with jax.set_mesh(self._mesh), nn.logical_axis_rules(RULES):
            order = list(evaluation_batches(examples, self._batch_size, self._longest))
            batches = (examples.batch(rows[own], length) for rows, length in order)
            on_mesh = on_devices(batches, self._mesh, self._batch_size)
            for (rows, _), logits in zip(order, fetched(self._apply(params, batch) for batch in on_mesh)):
                for row, output in zip(rows, logits):
                    if row >= 0:
                        is_per_token = output.ndim == 2
                        outputs[row] = output[: examples.lengths[row]] if is_per_token else output
                after_batch()
        return outputs


make_predictor = functools.lru_cache(maxsize=4)(Predictor)  # compiled once for all trials of a search


def predict(objective: Objective, source, examples: Examples) -> list[np.ndarray]:
    """Returns the logits of each example by a checkpoint (`interop.pretrained.Pretrained`), using one device."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    model = objective.make_model(source.config, **source.head)
    params = jax.device_put(source.params, replicated(mesh))  # once, not per batch
    return Predictor(model, mesh, PREDICTION_BATCH)(params, examples)
