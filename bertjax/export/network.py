"""The network of a checkpoint with its output layer, as a pure function."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from bertjax.common.errors import UserError
from bertjax.config.model_config import Compute
from bertjax.finetuning.task import FineTuningTask
from bertjax.inference import output_layers
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families

Function = Callable[..., jax.Array]  # (params, batch, dropout_keys) -> array


def outputs(source: Pretrained, task: FineTuningTask | None, compute: Compute) -> Function:
    """Returns the function that `bertjax.Model.apply` computes.

    Args:
      source: the checkpoint.
      task: the task of a fine-tuned checkpoint.
      compute: dtypes and kernels.

    Raises:
      UserError: the task does not define `output_layer`.
    """
    config = source.config
    if task is not None:
        if task.output_layer is None:
            name = source.settings.get("task")
            raise UserError(f"{source.path}: its task {name!r} has no output_layer; encode returns hidden states")
        layer = task.output_layer(source)
        model = layer.model(config, source.head, compute=compute)
        return functools.partial(output_layers.apply, model, layer.pooled)
    if not source.predicts_words:
        return states(source, compute)
    words = output_layers.words_model(source, compute)[0]
    readers = 2 if families.family_of(config).lm_type(config) == "bidirectional" else 1

    def logits(params: dict[str, Any], batch: dict[str, Any], dropout_keys: jax.Array | None) -> jax.Array:
        rows, length = batch["input_ids"].shape
        positions = jnp.concatenate([jnp.broadcast_to(jnp.arange(length), (rows, length))] * readers, axis=1)
        outputs = words.apply({"params": params}, **batch, masked_positions=positions, dropout_keys=dropout_keys)
        return cast(jax.Array, outputs)[..., : config.vocab_size]

    return logits


def states(source: Pretrained, compute: Compute) -> Function:
    """Returns the function that computes the last hidden states `[batch, length, hidden]`."""
    encoder = families.family_of(source.config).build(source.config, compute)

    def run(params: dict[str, Any], batch: dict[str, Any], dropout_keys: jax.Array | None) -> jax.Array:
        variables = {"params": params["bert"]}
        return cast(jax.Array, encoder.apply(variables, **batch, dropout_keys=dropout_keys, method="encode"))

    return run
